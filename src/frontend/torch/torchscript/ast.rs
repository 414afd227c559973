//! The syntax tree of serialised TorchScript: the few forms of Python that its printer writes.
//!
//! Types are expressions, because little reads them. Every expression and statement has its line.

use std::sync::Arc;

pub type Name = Arc<str>;

#[derive(Clone, Debug, PartialEq)]
pub struct Expr {
    pub line: u32,
    pub kind: ExprKind,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ExprKind {
    Name(Name),
    Attribute(Box<Expr>, Name),
    Subscript(Box<Expr>, Box<Expr>),
    Call(Box<Call>),
    Int(i64),
    Float(f64),
    Str(Name),
    Bool(bool),
    None,
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Negative(Box<Expr>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub function: Expr,
    pub args: Vec<Expr>,
    pub keywords: Vec<(Name, Expr)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Stmt {
    pub line: u32,
    pub kind: StmtKind,
}

#[derive(Clone, Debug, PartialEq)]
pub enum StmtKind {
    Assign(Name, Expr),
    /// `a, b, = value`
    Unpack(Vec<Name>, Expr),
    Expr(Expr),
    Return(Option<Expr>),
    If {
        condition: Expr,
        then: Vec<Stmt>,
        otherwise: Vec<Stmt>,
    },
    For {
        variable: Name,
        over: Expr,
        body: Vec<Stmt>,
    },
    While {
        condition: Expr,
        body: Vec<Stmt>,
    },
    Pass,
}

/// One source file.
#[derive(Debug, Default, PartialEq)]
pub struct File {
    pub classes: Vec<Class>,
    pub functions: Vec<Function>,
}

#[derive(Debug, PartialEq)]
pub struct Class {
    pub name: Name,
    /// `Module`, `NamedTuple`, …; empty for a plain class.
    pub base: Name,
    pub line: u32,
    /// The names in `__parameters__`.
    pub parameters: Vec<Name>,
    /// The names in `__buffers__`.
    pub buffers: Vec<Name>,
    /// `n : Final[int] = 3`.
    pub constants: Vec<(Name, Expr)>,
    pub methods: Vec<Function>,
}

#[derive(Debug, PartialEq)]
pub struct Function {
    pub name: Name,
    pub line: u32,
    /// The parameters. Those of a method begin with `self`.
    pub parameters: Vec<Parameter>,
    pub body: Vec<Stmt>,
}

#[derive(Debug, PartialEq)]
pub struct Parameter {
    pub name: Name,
    pub ty: Option<Expr>,
    pub default: Option<Expr>,
}

impl Expr {
    /// Returns `a.b.c` if the expression consists of names and dots.
    pub fn dotted(&self) -> Option<String> {
        match &self.kind {
            ExprKind::Name(name) => Some(name.to_string()),
            ExprKind::Attribute(of, name) => Some(format!("{}.{name}", of.dotted()?)),
            _ => None,
        }
    }
}
