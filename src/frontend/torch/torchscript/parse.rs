//! A recursive-descent parser of serialised TorchScript.
//!
//! The grammar covers what TorchScript's printer writes. Any other form is refused with its line. Nesting is bounded, so
//! no file exhausts the stack.

use super::ast::{Call, Class, Expr, ExprKind, File, Function, Name, Parameter, Stmt, StmtKind};
use super::lexer::{Token, tokens};
use ckpt_passes::{Error, Result};

/// The largest depth of brackets, calls and blocks.
const MAX_DEPTH: usize = 100;

/// Parses the text of one file.
///
/// # Errors
/// `code` with the line of what is not the dialect.
pub fn parse(text: &str) -> Result<File> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        at: 0,
        depth: 0,
    };
    let mut file = File::default();
    while *parser.peek() != Token::End {
        if parser.word("class") {
            file.classes.push(parser.class()?);
        } else if parser.word("def") {
            file.functions.push(parser.function()?);
        } else {
            return Err(parser.unexpected("`class` or `def`"));
        }
    }
    Ok(file)
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    depth: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        // The last token is `End`. The parser never goes past it.
        &self.tokens[self.at].0
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        if token != Token::End {
            self.at += 1;
        }
        token
    }

    fn unexpected(&self, wanted: &str) -> Box<Error> {
        let found = match self.peek() {
            Token::Name(name) => format!("`{}`", name.chars().take(60).collect::<String>()),
            Token::Mark(mark) => format!("`{mark}`"),
            Token::Newline => "the end of the line".into(),
            Token::End => "the end of the file".into(),
            Token::Indent | Token::Dedent => "another indentation".into(),
            Token::Int(_) | Token::Float(_) => "a number".into(),
            Token::Str(_) => "a string".into(),
        };
        Error::model("code", "this is not serialised TorchScript")
            .at(format!("line {}", self.line()))
            .expected(wanted)
            .found(found)
    }

    /// Takes a mark if it is there.
    fn mark(&mut self, mark: &str) -> bool {
        let there = matches!(self.peek(), Token::Mark(m) if *m == mark);
        self.at += usize::from(there);
        there
    }

    fn need(&mut self, mark: &'static str) -> Result<()> {
        match self.mark(mark) {
            true => Ok(()),
            false => Err(self.unexpected(&format!("`{mark}`"))),
        }
    }

    /// Takes a mark and the expression behind it, if the mark is there.
    fn behind(&mut self, mark: &str) -> Result<Option<Expr>> {
        self.mark(mark).then(|| self.expr()).transpose()
    }

    /// Takes a word if it is there.
    fn word(&mut self, word: &str) -> bool {
        let there = matches!(self.peek(), Token::Name(n) if **n == *word);
        self.at += usize::from(there);
        there
    }

    fn name(&mut self) -> Result<Name> {
        match self.peek() {
            Token::Name(name) => {
                let name = name.clone();
                self.at += 1;
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    fn newline(&mut self) -> Result<()> {
        match self.peek() {
            Token::Newline => {
                self.at += 1;
                Ok(())
            }
            _ => Err(self.unexpected("the end of the line")),
        }
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: fn(&mut Parser) -> Result<T>) -> Result<T> {
        if self.depth == MAX_DEPTH {
            return Err(Error::model("code", "the code is nested too deeply")
                .at(format!("line {}", self.line()))
                .expected(format!("at most {MAX_DEPTH} levels")));
        }
        self.depth += 1;
        let done = inner(self);
        self.depth -= 1;
        done
    }

    fn class(&mut self) -> Result<Class> {
        let line = self.line();
        let name = self.name()?;
        let mut base: Name = "".into();
        if self.mark("(") && !self.mark(")") {
            base = self.name()?;
            self.need(")")?;
        }
        let mut class = Class {
            name,
            base,
            line,
            parameters: Vec::new(),
            buffers: Vec::new(),
            constants: Vec::new(),
            methods: Vec::new(),
        };
        self.block_start()?;
        while *self.peek() != Token::Dedent {
            self.member(&mut class)?;
        }
        self.at += 1;
        Ok(class)
    }

    fn member(&mut self, class: &mut Class) -> Result<()> {
        if self.word("def") {
            class.methods.push(self.function()?);
            return Ok(());
        }
        if self.word("pass") {
            return self.newline();
        }
        let name = self.name()?;
        if self.mark("[") {
            // __annotations__["0"] = type
            self.expr()?;
            self.need("]")?;
        }
        let annotation = self.behind(":")?;
        let value = self.behind("=")?;
        self.newline()?;
        match (&*name, annotation, value) {
            ("__parameters__", None, Some(value)) => class.parameters = strings(&value),
            ("__buffers__", None, Some(value)) => class.buffers = strings(&value),
            (_, Some(_), Some(value)) => class.constants.push((name, value)),
            _ => {}
        }
        Ok(())
    }

    fn function(&mut self) -> Result<Function> {
        let line = self.line();
        let name = self.name()?;
        self.need("(")?;
        let parameters = self.listed(")", |parser| {
            Ok(Parameter {
                name: parser.name()?,
                ty: parser.behind(":")?,
                default: parser.behind("=")?,
            })
        })?;
        if self.mark("->") {
            self.expr()?;
        }
        Ok(Function {
            name,
            line,
            parameters,
            body: self.block()?,
        })
    }

    /// Takes `:`, the end of the line, and the indentation.
    fn block_start(&mut self) -> Result<()> {
        self.need(":")?;
        self.newline()?;
        if *self.peek() != Token::Indent {
            return Err(self.unexpected("an indented block"));
        }
        self.at += 1;
        Ok(())
    }

    fn block(&mut self) -> Result<Vec<Stmt>> {
        self.block_start()?;
        let mut body = Vec::new();
        while *self.peek() != Token::Dedent {
            body.push(self.deeper(Parser::statement)?);
        }
        self.at += 1;
        Ok(body)
    }

    fn statement(&mut self) -> Result<Stmt> {
        let line = self.line();
        let kind = if self.word("pass") {
            self.newline()?;
            StmtKind::Pass
        } else if self.word("return") {
            let value = match self.peek() {
                Token::Newline => None,
                _ => Some(self.exprs()?),
            };
            self.newline()?;
            StmtKind::Return(value)
        } else if self.word("if") {
            let condition = self.expr()?;
            let then = self.block()?;
            let otherwise = match self.word("else") {
                true => self.block()?,
                false => Vec::new(),
            };
            StmtKind::If {
                condition,
                then,
                otherwise,
            }
        } else if self.word("for") {
            let variable = self.name()?;
            if !self.word("in") {
                return Err(self.unexpected("`in`"));
            }
            StmtKind::For {
                variable,
                over: self.expr()?,
                body: self.block()?,
            }
        } else if self.word("while") {
            StmtKind::While {
                condition: self.expr()?,
                body: self.block()?,
            }
        } else {
            let kind = self.assignment()?;
            self.newline()?;
            kind
        };
        Ok(Stmt { line, kind })
    }

    /// Parses `a = x`, `a: T = x`, `a, b, = x`, or an expression for its effect.
    fn assignment(&mut self) -> Result<StmtKind> {
        let targets = self.exprs()?;
        if self.mark(":") {
            self.expr()?;
        }
        if !self.mark("=") {
            return Ok(StmtKind::Expr(targets));
        }
        let value = self.exprs()?;
        let name = |e: Expr| match e.kind {
            ExprKind::Name(name) => Ok(name),
            _ => Err(Error::model("code", "only names can be assigned to")
                .at(format!("line {}", e.line))),
        };
        Ok(match targets.kind {
            ExprKind::Tuple(items) => {
                StmtKind::Unpack(items.into_iter().map(name).collect::<Result<_>>()?, value)
            }
            _ => StmtKind::Assign(name(targets)?, value),
        })
    }

    /// Parses an expression, or a tuple of several with commas.
    fn exprs(&mut self) -> Result<Expr> {
        let line = self.line();
        let first = self.expr()?;
        if *self.peek() != Token::Mark(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.mark(",") {
            if matches!(self.peek(), Token::Mark("=") | Token::Newline) {
                break;
            }
            items.push(self.expr()?);
        }
        Ok(Expr {
            line,
            kind: ExprKind::Tuple(items),
        })
    }

    fn expr(&mut self) -> Result<Expr> {
        self.deeper(Parser::postfix)
    }

    /// Parses an atom with calls, subscripts and attributes behind it.
    fn postfix(&mut self) -> Result<Expr> {
        let line = self.line();
        let mut expr = Expr {
            line,
            kind: self.atom()?,
        };
        // Each of these nests the expression before it.
        for _ in 0..MAX_DEPTH {
            let kind = if self.mark(".") {
                ExprKind::Attribute(Box::new(expr), self.name()?)
            } else if self.mark("(") {
                ExprKind::Call(Box::new(self.arguments(expr)?))
            } else if self.mark("[") {
                let index = self.items("]")?;
                let index = match <[Expr; 1]>::try_from(index) {
                    Ok([one]) => one,
                    Err(index) => Expr {
                        line,
                        kind: ExprKind::Tuple(index),
                    },
                };
                ExprKind::Subscript(Box::new(expr), Box::new(index))
            } else {
                return Ok(expr);
            };
            expr = Expr { line, kind };
        }
        Err(Error::model("code", "an expression is too long").at(format!("line {line}")))
    }

    fn atom(&mut self) -> Result<ExprKind> {
        let start = self.at;
        Ok(match self.next() {
            Token::Name(name) => match &*name {
                "True" => ExprKind::Bool(true),
                "False" => ExprKind::Bool(false),
                "None" => ExprKind::None,
                _ => ExprKind::Name(name),
            },
            Token::Int(n) => match i64::try_from(n) {
                Ok(n) => ExprKind::Int(n),
                Err(_) => {
                    self.at = start;
                    return Err(self.unexpected("a number of 64 bits"));
                }
            },
            Token::Float(x) => ExprKind::Float(x),
            Token::Str(text) => ExprKind::Str(text),
            Token::Mark("-") => match *self.peek() {
                Token::Int(n) if n == i64::MIN.unsigned_abs() => {
                    self.at += 1;
                    ExprKind::Int(i64::MIN)
                }
                _ => ExprKind::Negative(Box::new(self.deeper(Parser::postfix)?)),
            },
            Token::Mark("[") => ExprKind::List(self.items("]")?),
            Token::Mark("(") => {
                let mut items = self.items(")")?;
                // `(x)` is x, `(x,)` a tuple.
                let grouped = self.tokens[self.at - 2].0 != Token::Mark(",");
                match items.pop() {
                    Some(one) if items.is_empty() && grouped => one.kind,
                    last => {
                        items.extend(last);
                        ExprKind::Tuple(items)
                    }
                }
            }
            Token::Mark("{") => {
                let items = self.listed("}", |parser| {
                    let key = parser.expr()?;
                    parser.need(":")?;
                    Ok((key, parser.expr()?))
                })?;
                ExprKind::Dict(items)
            }
            _ => {
                self.at = start;
                return Err(self.unexpected("an expression"));
            }
        })
    }

    /// Parses expressions with commas up to the closing mark.
    fn items(&mut self, close: &'static str) -> Result<Vec<Expr>> {
        self.listed(close, Parser::expr)
    }

    /// Parses entries with commas up to the closing mark.
    fn listed<T>(
        &mut self,
        close: &'static str,
        entry: impl Fn(&mut Parser) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut entries = Vec::new();
        while !self.mark(close) {
            entries.push(entry(self)?);
            if !self.mark(",") && *self.peek() != Token::Mark(close) {
                return Err(self.unexpected(&format!("`,` or `{close}`")));
            }
        }
        Ok(entries)
    }

    fn arguments(&mut self, function: Expr) -> Result<Call> {
        let all = self.listed(")", |parser| {
            let value = parser.expr()?;
            match value.kind {
                ExprKind::Name(name) if parser.mark("=") => Ok((Some(name), parser.expr()?)),
                _ => Ok((None, value)),
            }
        })?;
        let mut call = Call {
            function,
            args: Vec::new(),
            keywords: Vec::new(),
        };
        for (name, value) in all {
            match name {
                Some(name) => call.keywords.push((name, value)),
                None => call.args.push(value),
            }
        }
        Ok(call)
    }
}

/// Returns the strings of a list literal.
fn strings(list: &Expr) -> Vec<Name> {
    let ExprKind::List(items) = &list.kind else {
        return Vec::new();
    };
    let text = |e: &Expr| match &e.kind {
        ExprKind::Str(text) => Some(text.clone()),
        _ => None,
    };
    items.iter().filter_map(text).collect()
}

#[cfg(test)]
mod tests;
