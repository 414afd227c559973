//! Text to graph. The language is described in [the module](super).
//!
//! The parser reads each line once. It reports names that are taken or undefined, and operands, attributes and
//! recompute nodes that do not fit, with line and column. The verifier checks the rest at the end, so a parsed graph
//! satisfies every invariant.

use super::dims;
use super::literal::{content, to_f32};
use super::print::{phase_word, role_word};
use super::scan::{Number, Scan};
use crate::error::{Error, Kind, Result};
use crate::ir::edit::NewNode;
use crate::ir::op::OpDef;
use crate::ir::typing::check_arity;
use crate::ir::verify::{check_attrs, check_copy, verify};
use crate::ir::{
    Attr, AttrKind, Attrs, DType, Graph, Loc, NodeId, Origin, Phase, Role, Tensor, Ty, ValueId,
};
use crate::ops;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Reads a graph. A constant that is given as a hash has no bytes.
///
/// # Errors
/// `error[parse]`, or the code of the rule that a line breaks (`I2` use before definition, `arity`, `attribute`, …),
/// with line and column; `error[verify]` where types do not hold together.
pub fn parse(text: &str) -> Result<Graph> {
    Parser::new(text, false).graph()
}

/// Reads a graph like [`parse`], with invented contents for constants that are given as a hash. The same hash has the
/// same contents.
pub fn parse_filled(text: &str) -> Result<Graph> {
    Parser::new(text, true).graph()
}

/// Returns the role that a word names.
fn role_of(word: &str) -> Option<Role> {
    let roles = [Role::Forward, Role::Loss, Role::Backward];
    roles.into_iter().find(|r| role_word(*r) == word)
}

struct Parser<'a> {
    s: Scan<'a>,
    graph: Graph,
    values: FxHashMap<String, ValueId>,
    fill: bool,
    role: Role,
    scopes: Scopes,
}

/// Modules around a node, outermost first: path and class.
type Scopes = Vec<(String, Option<String>)>;

/// What may follow the types of a node.
#[derive(Default)]
struct Clauses {
    name: Option<String>,
    recompute_of: Option<NodeId>,
    segment: Option<u32>,
    role: Option<Role>,
    scopes: Option<Scopes>,
    place: Option<String>,
    meta: Option<BTreeMap<String, String>>,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str, fill: bool) -> Parser<'a> {
        Parser {
            s: Scan::new(text),
            graph: Graph::default(),
            values: FxHashMap::default(),
            fill,
            role: Role::Forward,
            scopes: Vec::new(),
        }
    }

    fn graph(mut self) -> Result<Graph> {
        self.s.lines();
        self.s.expect_word("graph")?;
        self.graph.name = self.s.name("@", "the graph's name")?;
        self.graph.phase = self.phase()?;
        self.inputs()?;
        self.s.expect("->")?;
        let outputs = self.output_names()?;
        self.s.expect("{")?;
        self.s.line_end()?;
        loop {
            self.s.lines();
            if self.s.eat("}") {
                break;
            }
            self.line()?;
            self.s.line_end()?;
        }
        self.s.lines();
        if !self.s.at_end() {
            return Err(self.s.unexpected("the end of the text"));
        }
        for (at, name) in outputs {
            let value = self.value(at, &name)?;
            self.graph.add_output(value);
        }
        verify(&self.graph).map_err(|e| match e.kind() {
            Kind::Bug => Error::model("verify", e.message()),
            _ => e,
        })?;
        Ok(self.graph)
    }

    fn phase(&mut self) -> Result<Phase> {
        let at = self.s.at;
        let word = self.s.word("a phase")?;
        let all = [
            Phase::Imported,
            Phase::Typed,
            Phase::Training,
            Phase::Rewritten,
        ];
        all.into_iter()
            .find(|p| phase_word(*p) == word)
            .ok_or_else(|| {
                self.s
                    .fail_at(at, format!("`{word}` is not a phase"))
                    .expected("imported, typed, training or rewritten")
            })
    }

    fn inputs(&mut self) -> Result<()> {
        self.s.expect("(")?;
        self.s.lines();
        if self.s.eat(")") {
            return Ok(());
        }
        loop {
            self.s.lines();
            let name = self.new_name()?;
            self.s.expect(":")?;
            let ty = self.ty_or_unknown()?;
            let id = self.graph.add_input(&name, ty);
            self.values.insert(name, id);
            self.origin(id)?;
            self.s.lines();
            if self.s.eat(")") {
                return Ok(());
            }
            self.s.expect(",")?;
        }
    }

    fn output_names(&mut self) -> Result<Vec<(usize, String)>> {
        let mut names = Vec::new();
        self.s.expect("(")?;
        self.s.lines();
        if self.s.eat(")") {
            return Ok(names);
        }
        loop {
            self.s.lines();
            names.push((self.s.at, self.s.name("%", "a value")?));
            self.s.lines();
            if self.s.eat(")") {
                return Ok(names);
            }
            self.s.expect(",")?;
        }
    }

    /// One line between the braces.
    fn line(&mut self) -> Result<()> {
        if self.s.peek() == Some(b'%') {
            return self.node();
        }
        let at = self.s.at;
        let word = self.s.word("a node, a label or `}`")?;
        match word {
            "meta" => {
                let key = self.s.word_or_string("a key")?;
                self.s.expect("=")?;
                let value = self.s.string()?;
                if self.graph.meta.insert(key, value).is_some() {
                    return Err(self.s.fail_at(at, "this metadata is given twice"));
                }
                Ok(())
            }
            "init" => self.init(),
            "scope" => {
                self.scopes = self.scope()?;
                self.s.expect(":")
            }
            _ => {
                self.role = role_of(word).ok_or_else(|| {
                    self.s
                        .fail_at(at, format!("`{word}` starts no line"))
                        .expected("a node, meta, init, scope, forward, loss or backward")
                })?;
                self.s.expect(":")
            }
        }
    }

    fn init(&mut self) -> Result<()> {
        let name = self.new_name()?;
        self.s.expect(":")?;
        let (dtype, dims) = self.static_ty()?;
        self.s.expect("=")?;
        let tensor = content(&mut self.s, dtype, dims, self.fill)?;
        let id = self.graph.add_init(&name, tensor);
        self.values.insert(name, id);
        self.origin(id)
    }

    fn origin(&mut self, id: ValueId) -> Result<()> {
        if !self.s.eat_word("origin") {
            return Ok(());
        }
        let mut origin = Origin {
            names: self.names()?,
            ..Origin::default()
        };
        origin.transposed = self.s.eat_word("transposed");
        if self.s.eat_word("parameter") {
            origin.is_parameter = Some(true);
        } else if self.s.eat_word("buffer") {
            origin.is_parameter = Some(false);
        }
        origin.is_persistent = self.s.eat_word("persistent");
        origin.frozen = self.s.eat_word("frozen");
        if self.s.eat_word("folded") {
            origin.folded_from = self.names()?;
        }
        self.graph.origins.insert(id, origin);
        Ok(())
    }

    /// Quoted names, perhaps none.
    fn names(&mut self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        self.s.blanks();
        while self.s.peek() == Some(b'"') {
            names.push(self.s.string()?);
            // In a list of inputs the comma may belong to the list.
            let mut ahead = self.s.clone();
            ahead.eat(",");
            ahead.blanks();
            if ahead.peek() == Some(b'"') {
                self.s = ahead;
            }
        }
        Ok(names)
    }

    /// Modules, perhaps none.
    fn scope(&mut self) -> Result<Scopes> {
        let mut scopes = Vec::new();
        self.s.blanks();
        if self.s.peek() != Some(b'"') {
            return Ok(scopes);
        }
        loop {
            let path = self.s.string()?;
            let class = match self.s.eat_word("is") {
                true => Some(self.s.string()?),
                false => None,
            };
            scopes.push((path, class));
            if !self.s.eat(",") {
                return Ok(scopes);
            }
        }
    }

    fn node(&mut self) -> Result<()> {
        let start = self.s.at;
        let mut outs = Vec::new();
        loop {
            let at = self.s.at;
            let name = self.new_name()?;
            if outs.contains(&name) {
                return Err(self.taken(at, &name));
            }
            outs.push(name);
            if !self.s.eat(",") {
                break;
            }
        }
        self.s.expect("=")?;
        let op = self.op()?;
        let ins = self.operands()?;
        let attrs = self.attrs(op)?;
        let types = self.types(outs.len())?;
        let clauses = self.clauses()?;
        let name = clauses.name.as_ref().unwrap_or(&outs[0]);
        if self.graph.has_node_name(name) {
            return Err(self.broken("I8", start, format!("two nodes are named `{name}`")));
        }
        let (role, loc) = match clauses.recompute_of {
            Some(original) => {
                let source = self.graph.node(original);
                (source.role, Loc::clone(&source.loc))
            }
            None => {
                let scopes = self.scopes.clone();
                (
                    self.role,
                    Loc {
                        node: name.clone(),
                        scopes,
                    },
                )
            }
        };
        let id = self.graph.add_node(NewNode {
            op,
            name,
            attrs,
            ins,
            outs: outs.iter().cloned().zip(types).collect(),
            loc: Arc::new(Loc {
                node: clauses.place.unwrap_or(loc.node),
                scopes: clauses.scopes.unwrap_or(loc.scopes),
            }),
            role: clauses.role.unwrap_or(role),
        });
        self.graph
            .set_recompute_of(id, clauses.recompute_of, clauses.segment);
        *self.graph.meta_mut(id) = clauses.meta.unwrap_or_default();
        let results = self.graph.node(id).outs.clone();
        self.values.extend(outs.into_iter().zip(results));
        check_arity(&self.graph, id)
            .and_then(|()| check_attrs(&self.graph, id))
            .map_err(|e| self.here(start, e))?;
        check_copy(&self.graph, id)
            .map_err(|e| self.here(start, Error::model("recompute", e.message())))
    }

    fn op(&mut self) -> Result<&'static OpDef> {
        self.s.blanks();
        let at = self.s.at;
        let name = self.s.word("an op")?;
        ops::find(name).ok_or_else(|| self.broken("op", at, format!("there is no op `{name}`")))
    }

    fn operands(&mut self) -> Result<Vec<Option<ValueId>>> {
        let mut ins = Vec::new();
        self.s.blanks();
        if self.s.peek() != Some(b'%') && self.s.peek_word() != "_" {
            return Ok(ins);
        }
        loop {
            self.s.blanks();
            if self.s.eat_word("_") {
                ins.push(None);
            } else {
                let at = self.s.at;
                let name = self.s.name("%", "a value or `_`")?;
                ins.push(Some(self.value(at, &name)?));
            }
            if !self.s.eat(",") {
                return Ok(ins);
            }
        }
    }

    fn attrs(&mut self, op: &'static OpDef) -> Result<Attrs> {
        let mut attrs = Attrs::new();
        if !self.s.eat("{") {
            return Ok(attrs);
        }
        loop {
            self.s.blanks();
            let at = self.s.at;
            let name = self.s.word_or_string("the name of an attribute")?;
            self.s.expect("=")?;
            let mut value = self.attr()?;
            let spec = op.attrs.iter().find(|a| a.name == name);
            if let (Attr::Int(n), Some(AttrKind::Float)) = (&value, spec.map(|a| a.kind)) {
                value = Attr::Float(*n as f32);
            }
            if attrs.get(&name).is_some() {
                return Err(self.broken(
                    "attribute",
                    at,
                    format!("attribute `{name}` is given twice"),
                ));
            }
            attrs.set(&name, value);
            if self.s.eat("}") {
                return Ok(attrs);
            }
            self.s.expect(",")?;
        }
    }

    fn attr(&mut self) -> Result<Attr> {
        self.s.blanks();
        if self.s.peek() == Some(b'"') {
            return Ok(Attr::Str(self.s.string()?));
        }
        if self.s.peek() == Some(b'[') {
            return Ok(Attr::Ints(self.list(Parser::int)?));
        }
        match self.s.peek_word() {
            "floats" => {
                self.s.expect_word("floats")?;
                return Ok(Attr::Floats(self.list(|p| {
                    let n = p.s.number()?;
                    to_f32(&p.s, n)
                })?));
            }
            "strs" => {
                self.s.expect_word("strs")?;
                return Ok(Attr::Strs(self.list(|p| p.s.string())?));
            }
            "tensor" => {
                self.s.expect_word("tensor")?;
                let (dtype, dims) = self.static_ty()?;
                return Ok(Attr::Tensor(self.tensor(dtype, dims)?));
            }
            word => {
                if let Some(dtype) = DType::from_name(word) {
                    self.s.expect_word(word)?;
                    return Ok(Attr::DType(dtype));
                }
            }
        }
        let at = self.s.at;
        match self.s.number()? {
            Number::Int(n) => i64::try_from(n)
                .map(Attr::Int)
                .map_err(|_| self.s.fail_at(at, "the number is too large")),
            n => Ok(Attr::Float(to_f32(&self.s, n)?)),
        }
    }

    fn tensor(&mut self, dtype: DType, dims: Vec<u64>) -> Result<Tensor> {
        content(&mut self.s, dtype, dims, self.fill)
    }

    fn list<T>(&mut self, item: impl Fn(&mut Parser<'a>) -> Result<T>) -> Result<Vec<T>> {
        let mut items = Vec::new();
        self.s.expect("[")?;
        if self.s.eat("]") {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.s.eat("]") {
                return Ok(items);
            }
            self.s.expect(",")?;
        }
    }

    fn int(&mut self) -> Result<i64> {
        let at = self.s.at;
        match self.s.number()? {
            Number::Int(n) => {
                i64::try_from(n).map_err(|_| self.s.fail_at(at, "the number is too large"))
            }
            _ => Err(self.s.fail_at(at, "expected an integer")),
        }
    }

    fn types(&mut self, results: usize) -> Result<Vec<Option<Ty>>> {
        if !self.s.eat(":") {
            return Ok(vec![None; results]);
        }
        let mut types = Vec::new();
        loop {
            types.push(self.ty_or_unknown()?);
            if !self.s.eat(",") {
                break;
            }
        }
        if types.len() != results {
            return Err(self
                .s
                .fail("one type a result is needed")
                .expected(results.to_string())
                .found(types.len().to_string()));
        }
        Ok(types)
    }

    fn clauses(&mut self) -> Result<Clauses> {
        let mut c = Clauses::default();
        while !self.s.at_line_end() {
            let at = self.s.at;
            let twice = if self.s.peek() == Some(b'@') {
                let place = self.s.name("@", "a place")?;
                c.place.replace(place).is_some()
            } else {
                match self.s.word("a clause or the end of the line")? {
                    "name" => {
                        let name = self.s.string()?;
                        c.name.replace(name).is_some()
                    }
                    "recompute_of" | "again" => {
                        self.s.blanks();
                        let at = self.s.at;
                        let name = self.s.name("%", "a value")?;
                        let value = self.value(at, &name)?;
                        let node = self.graph.def_node(value).ok_or_else(|| {
                            self.broken("recompute", at, format!("no node computes `{name}`"))
                        })?;
                        c.recompute_of.replace(node).is_some()
                    }
                    "segment" => {
                        let n = self.s.uint()?;
                        let n = u32::try_from(n)
                            .map_err(|_| self.s.fail_at(at, "the number is too large"))?;
                        c.segment.replace(n).is_some()
                    }
                    "role" => {
                        let word = self.s.word("a role")?;
                        let role = role_of(word)
                            .ok_or_else(|| self.s.fail_at(at, format!("`{word}` is not a role")))?;
                        c.role.replace(role).is_some()
                    }
                    "scope" => {
                        let scopes = self.scope()?;
                        c.scopes.replace(scopes).is_some()
                    }
                    "meta" => {
                        let meta = self.meta()?;
                        c.meta.replace(meta).is_some()
                    }
                    word => {
                        return Err(self
                            .s
                            .fail_at(at, format!("`{word}` is not a clause"))
                            .expected("name, recompute_of, segment, role, scope, @place or meta"));
                    }
                }
            };
            if twice {
                return Err(self.s.fail_at(at, "this is given twice"));
            }
        }
        Ok(c)
    }

    fn meta(&mut self) -> Result<BTreeMap<String, String>> {
        let mut meta = BTreeMap::new();
        self.s.expect("{")?;
        loop {
            let at = self.s.at;
            let key = self.s.word_or_string("a key")?;
            self.s.expect("=")?;
            if meta.insert(key, self.s.string()?).is_some() {
                return Err(self.s.fail_at(at, "this metadata is given twice"));
            }
            if self.s.eat("}") {
                return Ok(meta);
            }
            self.s.expect(",")?;
        }
    }

    fn ty_or_unknown(&mut self) -> Result<Option<Ty>> {
        if self.s.eat("?") {
            return Ok(None);
        }
        dims::ty(&mut self.s).map(Some)
    }

    /// A type whose sizes are numbers.
    fn static_ty(&mut self) -> Result<(DType, Vec<u64>)> {
        self.s.blanks();
        let at = self.s.at;
        let ty = dims::ty(&mut self.s)?;
        let dims = ty.dims.iter().map(|d| u64::try_from(d.as_const()?).ok());
        let dims: Option<Vec<u64>> = dims.collect();
        let dims = dims.ok_or_else(|| {
            self.s
                .fail_at(at, "a constant has sizes that are numbers, 0 or more")
        })?;
        Ok((ty.dtype, dims))
    }

    /// Reads the name of a value that is defined here.
    fn new_name(&mut self) -> Result<String> {
        self.s.blanks();
        let at = self.s.at;
        let name = self.s.name("%", "a value")?;
        match self.graph.has_value_name(&name) {
            true => Err(self.taken(at, &name)),
            false => Ok(name),
        }
    }

    fn taken(&self, at: usize, name: &str) -> Box<Error> {
        self.broken("I1", at, format!("`{name}` is defined twice"))
    }

    fn value(&self, at: usize, name: &str) -> Result<ValueId> {
        self.values
            .get(name)
            .copied()
            .ok_or_else(|| self.broken("I2", at, format!("`{name}` is not defined here")))
    }

    fn broken(&self, code: &'static str, at: usize, message: String) -> Box<Error> {
        self.here(at, Error::model(code, message))
    }

    fn here(&self, at: usize, error: Box<Error>) -> Box<Error> {
        error.at(self.s.place_of(at))
    }
}
