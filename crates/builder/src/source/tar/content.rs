//! The content of members: where it lies, and the holes of sparse files.

use std::io::{self, Read};

use super::{
    Archive,
    header::{BLOCK, Header},
    metadata::not_a_number,
    number,
    pax::{Attributes, SparseMap},
    sparse::{self, MAX_SEGMENTS, Segment},
};
use crate::error::SourceError;

/// The places of the rest of the current member's content.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// Bytes until the next header, without `padding`.
    pub(super) stored: u64,
    /// Bytes from the end of the content to the next block border.
    pub(super) padding: u64,
    /// Bytes of the file, holes included, that are not yet read.
    pub(super) left: u64,
    /// The current reading position in the file.
    pub(super) at: u64,
    /// Data segments still to be read, the next one last; `None` for a file that is not sparse.
    pub(super) segments: Option<Vec<Segment>>,
}

impl<R: Read> Archive<R> {
    /// Goes on behind the next `length` bytes of the member's content, which `pass` has the reader
    /// pass over. The member is not sparse, and has as many bytes left.
    pub(crate) fn pass_content(&mut self, length: u64, pass: impl FnOnce(&mut R)) {
        pass(&mut self.reader);
        self.offset += length;
        let layout = &mut self.content;
        layout.at += length;
        layout.left -= length;
        layout.stored -= length;
    }

    /// Determines whether the member is sparse, and where its data goes.
    pub(super) fn sparse(
        &mut self,
        header: &Header<'_>,
        attributes: &mut Attributes,
    ) -> Result<(), String> {
        let (map, size) = if header.kind() == b'S' {
            let mut map = Vec::new();
            let bad = || "the sparse map holds something that is not a number".to_owned();
            sparse::parse_old(header.sparse_segments(), &mut map).ok_or_else(bad)?;
            let mut more = header.sparse_continues();
            while more {
                let mut block = [0; BLOCK];
                self.read_exact(&mut block).map_err(|error| error.to_string())?;
                sparse::parse_old(&block[..504], &mut map).ok_or_else(bad)?;
                more = block[504] != 0;
                if map.len() > MAX_SEGMENTS {
                    return Err(format!("a sparse map of more than {MAX_SEGMENTS} segments"));
                }
            }
            let size = number::parse_unsigned(header.sparse_size());
            (map, size.ok_or_else(|| not_a_number("real size", header.sparse_size()))?)
        } else {
            let map = match attributes.sparse.map()? {
                None => return Ok(()),
                Some(SparseMap::Here(map)) => map,
                Some(SparseMap::InData) => self.read_sparse_map()?,
            };
            (map, attributes.sparse.size.ok_or("a sparse member without GNU.sparse.size")?)
        };
        sparse::check(&map, size, self.content.stored)?;
        let segments = map.into_iter().rev().filter(|segment| segment.length > 0).collect();
        self.content.left = size;
        self.content.segments = Some(segments);
        Ok(())
    }

    /// GNU sparse 1.0: decimal numbers, one per line, padded to a block, in front of the data.
    pub(super) fn read_sparse_map(&mut self) -> Result<Vec<Segment>, String> {
        let mut block = [0; BLOCK];
        let mut at = BLOCK;
        let mut next = |archive: &mut Self| -> Result<u64, String> {
            let mut digits = Vec::new();
            loop {
                if at == BLOCK {
                    if archive.content.stored < BLOCK as u64 {
                        return Err("the sparse map does not end before the data does".into());
                    }
                    archive.read_exact(&mut block).map_err(|error| error.to_string())?;
                    archive.content.stored -= BLOCK as u64;
                    at = 0;
                }
                let byte = block[at];
                at += 1;
                match byte {
                    b'\n' => break,
                    _ if digits.len() < 20 => digits.push(byte),
                    _ => break,
                }
            }
            let bad =
                || format!("the sparse map holds `{}`, expected a number", digits.escape_ascii());
            number::decimal(&digits).ok_or_else(bad)
        };
        let count = next(self)?;
        let count = usize::try_from(count).ok().filter(|&count| count <= MAX_SEGMENTS);
        let count =
            count.ok_or_else(|| format!("a sparse map of more than {MAX_SEGMENTS} segments"))?;
        let mut map = Vec::new();
        for _ in 0..count {
            map.push(Segment { start: next(self)?, length: next(self)? });
        }
        Ok(map)
    }

    pub(super) fn begin_content(&mut self, offset: u64, stored: u64) -> Result<(), SourceError> {
        let end =
            stored.checked_next_multiple_of(BLOCK as u64).filter(|&end| end <= i64::MAX as u64);
        let end = end.ok_or_else(|| SourceError::Archive {
            offset,
            problem: format!("a member of {stored} bytes, expected less than 2^63"),
        })?;
        self.content =
            Layout { stored, padding: end - stored, left: stored, at: 0, segments: None };
        Ok(())
    }

    /// Reads up to the next header.
    pub(super) fn skip_content(&mut self) -> Result<(), SourceError> {
        let content = std::mem::take(&mut self.content);
        let mut left = content.stored + content.padding;
        let mut scratch = [0; 16 * BLOCK];
        while left > 0 {
            let step = left.min(scratch.len() as u64) as usize;
            self.read_exact(&mut scratch[..step]).map_err(|error| SourceError::Archive {
                offset: self.offset,
                problem: error.to_string(),
            })?;
            left -= step as u64;
        }
        Ok(())
    }
}

/// The content of one member, see [`Archive::content`]. Ends after exactly the size of the entry.
#[derive(Debug)]
pub struct MemberContent<'a, R>(pub(super) &'a mut Archive<R>);

impl<R: Read> Read for MemberContent<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let layout = &mut self.0.content;
        let mut step = layout.left.min(buffer.len() as u64);
        let mut hole = false;
        if let Some(segment) = layout.segments.as_mut().map(|segments| segments.last_mut()) {
            match segment {
                Some(segment) if segment.start > layout.at => {
                    hole = true;
                    step = step.min(segment.start - layout.at);
                }
                Some(segment) => step = step.min(segment.length),
                None => hole = true,
            }
        }
        if step == 0 {
            return Ok(0);
        }
        let buffer = &mut buffer[..step as usize];
        let count = if hole {
            buffer.fill(0);
            buffer.len()
        } else {
            self.0.read_some(buffer)?
        };
        let layout = &mut self.0.content;
        layout.at += count as u64;
        layout.left -= count as u64;
        if !hole {
            layout.stored -= count as u64;
            if let Some(segments) = &mut layout.segments
                && let Some(segment) = segments.last_mut()
            {
                segment.start += count as u64;
                segment.length -= count as u64;
                if segment.length == 0 {
                    segments.pop();
                }
            }
        }
        Ok(count)
    }
}
