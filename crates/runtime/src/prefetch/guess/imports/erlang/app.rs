//! Files with Erlang terms as text: descriptions of applications, and lists of plugins.

/// Names in one file.
const NAMES: usize = 1 << 14;

/// What an application's `.app` file says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Application {
    /// The applications that are started before it.
    pub(super) needs: Vec<Vec<u8>>,
    /// The module that starts it.
    pub(super) starts: Vec<Vec<u8>>,
    pub(super) modules: Vec<Vec<u8>>,
}

/// Reads an `.app` file as far as it can be understood.
pub(super) fn application(text: &[u8]) -> Application {
    let mut application = Application::default();
    let mut tokens = Tokens { rest: text };
    while let Some(token) = tokens.next() {
        let Token::Atom(key) = token else { continue };
        match key {
            b"applications" | b"included_applications" | b"optional_applications" => {
                tokens.list(&mut application.needs);
            }
            b"modules" => tokens.list(&mut application.modules),
            b"mod" if application.starts.is_empty() => {
                // `{mod, {Module, Arguments}}`
                let is_module = |token: &Token<'_>| matches!(token, Token::Atom(_));
                if let Some(Token::Atom(name)) = tokens.by_ref().take(3).find(is_module) {
                    application.starts.push(name.to_vec());
                }
            }
            _ => {}
        }
    }
    application
}

/// The names in a list of plugins: `[one,two].`
pub(super) fn plugins(text: &[u8]) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    Tokens { rest: text }.list(&mut names);
    names
}

enum Token<'a> {
    Atom(&'a [u8]),
    Sign(u8),
}

/// Atoms and signs; strings, numbers, variables and comments are skipped.
struct Tokens<'a> {
    rest: &'a [u8],
}

impl Tokens<'_> {
    /// Adds the atoms of the list that follows, if one does.
    fn list(&mut self, names: &mut Vec<Vec<u8>>) {
        let mut is_open = false;
        for token in self {
            match token {
                Token::Atom(name) if is_open && names.len() < NAMES => names.push(name.to_vec()),
                Token::Sign(b'[') if !is_open => is_open = true,
                Token::Sign(b',') => {}
                _ => break,
            }
        }
    }
}

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_@".contains(byte);
        loop {
            let (first, rest) = self.rest.split_first()?;
            let end =
                |is_end: &dyn Fn(&u8) -> bool| rest.iter().position(is_end).unwrap_or(rest.len());
            let (token, end) = match first {
                b'%' => (None, end(&|byte| *byte == b'\n')),
                // What is escaped does not matter: no name has a quote.
                b'"' => (None, end(&|byte| *byte == b'"') + 1),
                b'\'' => {
                    let end = end(&|byte| *byte == b'\'');
                    (Some(Token::Atom(&rest[..end])), end + 1)
                }
                b'a'..=b'z' => {
                    let end = end(&|byte| !is_of_name(byte));
                    (Some(Token::Atom(&self.rest[..end + 1])), end)
                }
                byte if is_of_name(byte) => (None, end(&|byte| !is_of_name(byte))),
                byte if byte.is_ascii_whitespace() => (None, 0),
                sign => (Some(Token::Sign(*sign)), 0),
            };
            self.rest = rest.get(end..).unwrap_or_default();
            if token.is_some() {
                return token;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_application_names_its_modules_and_those_that_it_needs() {
        let text = b"%% applications, [none]\n{application, 'web', [{vsn, \"1.0, [x]\"},\n\
            {modules, ['web_app',web@1 , 'Other']}, {registered, [reg]},\n\
            {applications, [kernel,\n  stdlib]}, {mod, {web_app, [arg]}}, {env, [{port, 80}]}]}.";
        let names = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect();
        let expected = Application {
            needs: names(&["kernel", "stdlib"]),
            starts: names(&["web_app"]),
            modules: names(&["web_app", "web@1", "Other"]),
        };
        assert_eq!(application(text), expected);
        (0..text.len()).for_each(|len| drop(application(&text[..len])));
    }

    #[test]
    fn plugins_are_a_list() {
        assert_eq!(plugins(b"% mine\n[one, 'two'].\n"), [&b"one"[..], b"two"]);
        assert!(plugins(b"one.").is_empty() && plugins(b"[\"a").is_empty());
    }
}
