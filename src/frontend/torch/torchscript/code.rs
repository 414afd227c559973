//! The source files of an archive, found by qualified name and parsed when first needed.
//!
//! `__torch__.a.b.C` is class `C` of `code/__torch__/a/b.py`. Code that no call reaches is never read.

use super::ast::{Class, File, Function};
use super::parse::parse;
use crate::frontend::torch::archive::Archive;
use ckpt_passes::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// The largest text of one file. The code of a layer takes about ten kilobytes.
const MAX_FILE_BYTES: u64 = 8 << 20;

/// The largest text of all files.
const MAX_CODE_BYTES: u64 = 32 << 20;

/// The code of an archive.
pub struct Code<'a> {
    archive: &'a Archive,
    files: RefCell<BTreeMap<String, Rc<Source>>>,
    read_bytes: Cell<u64>,
}

/// A parsed file with the name of its entry.
pub struct Source {
    pub path: String,
    pub file: File,
}

/// A class, in its file.
#[derive(Clone)]
pub struct ClassAt {
    pub source: Rc<Source>,
    index: usize,
}

impl ClassAt {
    /// Returns the class.
    pub fn class(&self) -> &Class {
        &self.source.file.classes[self.index]
    }

    /// Returns a method of the class, if there is one of that name.
    pub fn method(&self, name: &str) -> Option<FunctionAt> {
        let method = self.class().methods.iter().position(|m| *m.name == *name)?;
        Some(FunctionAt {
            source: self.source.clone(),
            class: Some(self.index),
            index: method,
        })
    }
}

/// A function or method, in its file.
#[derive(Clone)]
pub struct FunctionAt {
    pub source: Rc<Source>,
    class: Option<usize>,
    index: usize,
}

impl FunctionAt {
    /// Returns the function.
    pub fn function(&self) -> &Function {
        match self.class {
            Some(class) => &self.source.file.classes[class].methods[self.index],
            None => &self.source.file.functions[self.index],
        }
    }

    /// Returns the place of a line in messages: `code/__torch__/m.py:12`.
    pub fn place(&self, line: u32) -> String {
        format!("{}:{line}", self.source.path)
    }
}

impl<'a> Code<'a> {
    pub fn new(archive: &'a Archive) -> Code<'a> {
        Code {
            archive,
            files: RefCell::default(),
            read_bytes: Cell::new(0),
        }
    }

    /// Returns the class of that qualified name.
    ///
    /// # Errors
    /// A file that is not there, does not parse, or has no such class.
    pub fn class(&self, module: &str, name: &str) -> Result<ClassAt> {
        let source = self.source(module)?;
        let index = source.file.classes.iter().position(|c| *c.name == *name);
        match index {
            Some(index) => Ok(ClassAt { source, index }),
            None => {
                Err(Error::model("code", format!("there is no class `{name}`"))
                    .at(source.path.clone()))
            }
        }
    }

    /// Returns the function of that qualified name; nothing if its file has no such function.
    ///
    /// # Errors
    /// A file that is not there or does not parse.
    pub fn function(&self, module: &str, name: &str) -> Result<Option<FunctionAt>> {
        let source = self.source(module)?;
        let index = source.file.functions.iter().position(|f| *f.name == *name);
        Ok(index.map(|index| FunctionAt {
            source,
            class: None,
            index,
        }))
    }

    fn source(&self, module: &str) -> Result<Rc<Source>> {
        let path = format!("code/{}.py", module.replace('.', "/"));
        if let Some(known) = self.files.borrow().get(&path) {
            return Ok(known.clone());
        }
        let text = self.archive.text(&path, MAX_FILE_BYTES)?;
        let total = self.read_bytes.get() + text.len() as u64;
        if total > MAX_CODE_BYTES {
            return Err(Error::model("code", "the archive has too much code")
                .expected(format!("at most {MAX_CODE_BYTES} bytes")));
        }
        self.read_bytes.set(total);
        let file = parse(&text).map_err(|e| e.at(path.clone()))?;
        let source = Rc::new(Source {
            path: path.clone(),
            file,
        });
        self.files.borrow_mut().insert(path, source.clone());
        Ok(source)
    }
}
