use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Args, builder::PossibleValuesParser};

use crate::{
    Session,
    doctor::{Node, Row, Verdict, names},
};

/// Show this node's abilities, its problems, and the commands that fix them
///
/// Exits with 1 if a problem keeps images from starting lazily. Only reads.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Only these checks
    #[arg(value_name = "CHECK", value_parser = PossibleValuesParser::new(names()))]
    checks: Vec<String>,
    /// For programs; docs/cli.md describes it
    #[arg(long)]
    json: bool,
    /// containerd's socket
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    containerd: PathBuf,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    let rows = Node::look(session, &arguments.containerd).examine(&arguments.checks);
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&serde_json::json!({ "checks": rows }))?);
    } else {
        rows.iter().for_each(print);
    }
    let lacks = rows.iter().any(|row| row.verdict == Verdict::Lacking);
    Ok(if lacks { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(row: &Row) {
    let verdict = match row.verdict {
        Verdict::Fine => "ok",
        Verdict::Advice => "advice",
        Verdict::Lacking => "LACKS",
    };
    println!("{verdict:<7} {:<16} {}", row.check, row.found);
    if let Some(fix) = &row.fix {
        println!("{:24} → {fix}", "");
    }
}
