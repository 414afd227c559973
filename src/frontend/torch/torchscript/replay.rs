//! Replays a saved program: walks its statements, calls its functions, and passes every op to the aten layer.
//!
//! Nothing is executed: tensors are handles of the graph being built, sizes are expressions. The replay follows control
//! flow that the file decides. A branch or loop that only data can decide is refused with its line. Called modules become
//! scopes. The depth of calls, the number of statements and the size of lists are bounded.

use super::ast::{Expr, ExprKind, Function, Name, Stmt, StmtKind};
use super::code::{Code, FunctionAt};
use super::item::{Containers, Content, Item};
use super::modules::Modules;
use crate::frontend::torch::archive::Archive;
use crate::frontend::torch::aten::Lowering;
use crate::frontend::torch::pickle::{Pickle, Ref};
use crate::frontend::torch::scalars;
use crate::frontend::torch::value::{TensorId, Value};
use ckpt_passes::ir::Dim;
use ckpt_passes::{Error, Result};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The largest depth of calls, blocks and expressions.
const MAX_DEPTH: usize = 240;

/// The largest number of statements of a program, with its loops unrolled.
const MAX_STEPS: u64 = 1_000_000;

/// The control flow after a statement.
pub(super) enum Flow {
    Next,
    Return(Item),
}

/// A call in progress.
pub(super) struct Frame {
    pub(super) function: FunctionAt,
    variables: FxHashMap<Name, Item>,
}

/// A program being replayed.
pub struct Replay<'a, 'g> {
    pub(super) archive: &'a Archive,
    pub(super) code: &'a Code<'a>,
    pub(super) modules: &'a Modules,
    pub(super) lowering: &'a mut Lowering<'g>,
    pub(super) containers: Containers,
    /// Module paths with classes, outermost first.
    pub(super) scopes: Vec<(String, Option<String>)>,
    pub(super) constants: Option<Pickle>,
    pub(super) tensors: BTreeMap<Ref, TensorId>,
    pub(super) warnings: Vec<String>,
    /// The number of variables to which the results of the next op are assigned.
    pub(super) unpacked: Option<usize>,
    /// Tensors of the graph that share memory with a number of the program.
    pub(super) viewed: Vec<TensorId>,
    depth: usize,
    steps: u64,
}

/// Returns true for a call of `torch.unbind`, whose number of results is that of the variables they are assigned to.
fn is_unbind(expr: &Expr) -> bool {
    let ExprKind::Call(call) = &expr.kind else {
        return false;
    };
    call.function.dotted().as_deref() == Some("torch.unbind")
}

pub(super) fn bad(message: impl Into<String>) -> Box<Error> {
    Error::model("code", message)
}

impl<'a, 'g> Replay<'a, 'g> {
    pub fn new(
        archive: &'a Archive,
        code: &'a Code<'a>,
        modules: &'a Modules,
        lowering: &'a mut Lowering<'g>,
    ) -> Replay<'a, 'g> {
        Replay {
            archive,
            code,
            modules,
            lowering,
            containers: Containers::default(),
            scopes: Vec::new(),
            unpacked: None,
            viewed: Vec::new(),
            constants: None,
            tensors: BTreeMap::new(),
            warnings: Vec::new(),
            depth: 0,
            steps: 0,
        }
    }

    /// Calls a method of a module; a module that is not the current one becomes a scope.
    ///
    /// # Errors
    /// A method that the class does not have, arguments that it does not take, and what its body refuses.
    pub fn call_method(
        &mut self,
        module: Ref,
        path: &Rc<str>,
        name: &str,
        mut args: Vec<Item>,
        keywords: Vec<(Name, Item)>,
    ) -> Result<Item> {
        let class = self.modules.class(self.code, module)?;
        let method = class.as_ref().and_then(|c| c.method(name));
        let (Some(class), Some(method)) = (class, method) else {
            return Err(bad(format!("the module `{path}` has no method `{name}`")));
        };
        args.insert(0, Item::Module(module, path.clone()));
        let inside = self.scopes.last().is_some_and(|(p, _)| **p == **path);
        if inside {
            return self.call(&method, args, keywords);
        }
        let scope = (path.to_string(), Some(class.class().name.to_string()));
        self.scopes.push(scope);
        let done = self.call(&method, args, keywords);
        self.scopes.pop();
        done
    }

    /// Calls a function with the given arguments and the defaults of the others.
    pub(super) fn call(
        &mut self,
        function: &FunctionAt,
        args: Vec<Item>,
        keywords: Vec<(Name, Item)>,
    ) -> Result<Item> {
        let mut frame = Frame {
            function: function.clone(),
            variables: FxHashMap::default(),
        };
        let declared: &Function = function.function();
        self.bind(&mut frame, declared, args, keywords)
            .map_err(|e| self.placed(e, &frame, declared.line))?;
        let flow = self.deeper(|replay| replay.block(&mut frame, &declared.body))?;
        Ok(match flow {
            Flow::Return(item) => item,
            Flow::Next => Item::NONE,
        })
    }

    fn bind(
        &mut self,
        frame: &mut Frame,
        function: &Function,
        args: Vec<Item>,
        keywords: Vec<(Name, Item)>,
    ) -> Result<()> {
        let wrong = |what: String| bad(format!("the call of `{}` {what}", function.name));
        if args.len() > function.parameters.len() {
            return Err(wrong(format!("has {} arguments", args.len()))
                .expected(format!("at most {}", function.parameters.len())));
        }
        let given = args.len();
        for (parameter, item) in function.parameters.iter().zip(args) {
            frame.variables.insert(parameter.name.clone(), item);
        }
        for (name, item) in keywords {
            let at = function.parameters.iter().position(|p| p.name == name);
            if at.is_none_or(|at| at < given) || frame.variables.contains_key(&name) {
                return Err(wrong(format!("has no place for `{name}`")));
            }
            frame.variables.insert(name, item);
        }
        for parameter in &function.parameters {
            if frame.variables.contains_key(&parameter.name) {
                continue;
            }
            let Some(default) = &parameter.default else {
                return Err(wrong(format!("lacks the argument `{}`", parameter.name)));
            };
            let item = self.expr(frame, default)?;
            frame.variables.insert(parameter.name.clone(), item);
        }
        Ok(())
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth == MAX_DEPTH {
            return Err(bad("the program calls too deeply").expected(format!("{MAX_DEPTH} levels")));
        }
        self.depth += 1;
        let done = inner(self);
        self.depth -= 1;
        done
    }

    /// Counts a statement.
    fn step(&mut self) -> Result<()> {
        self.steps += 1;
        match self.steps > MAX_STEPS {
            true => Err(bad("the program is too long, its loops unrolled")),
            false => Ok(()),
        }
    }

    /// Adds the line to an error that has none.
    fn placed(&self, error: Box<Error>, frame: &Frame, line: u32) -> Box<Error> {
        if error
            .notes()
            .any(|(label, text)| label == "at" && text.starts_with("code/"))
        {
            return error;
        }
        let module = self.scopes.last().map_or("", |(path, _)| path.as_str());
        let place = frame.function.place(line);
        error.at(match module {
            "" => place,
            module => format!("{place}, module `{module}`"),
        })
    }

    fn block(&mut self, frame: &mut Frame, body: &[Stmt]) -> Result<Flow> {
        for stmt in body {
            let flow = self.step().and_then(|()| self.statement(frame, stmt));
            let flow = flow.map_err(|e| self.placed(e, frame, stmt.line))?;
            if let Flow::Return(item) = flow {
                return Ok(Flow::Return(item));
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, frame: &mut Frame, stmt: &Stmt) -> Result<Flow> {
        match &stmt.kind {
            StmtKind::Pass => {}
            StmtKind::Assign(name, value) => {
                let item = self.expr(frame, value)?;
                frame.variables.insert(name.clone(), item);
            }
            StmtKind::Unpack(names, value) => {
                self.unpacked = is_unbind(value).then_some(names.len());
                let item = self.expr(frame, value)?;
                let items = match self.containers.items(&item) {
                    Some(items) if items.len() == names.len() => items.to_vec(),
                    Some(items) => {
                        return Err(bad("a list has the wrong length")
                            .expected(format!("{} members", names.len()))
                            .found(format!("{}", items.len())));
                    }
                    None => return Err(bad(format!("{} cannot be unpacked", item.kind()))),
                };
                for (name, item) in names.iter().zip(items) {
                    frame.variables.insert(name.clone(), item);
                }
            }
            StmtKind::Expr(value) => drop(self.expr(frame, value)?),
            StmtKind::Return(value) => {
                return Ok(Flow::Return(match value {
                    Some(value) => self.expr(frame, value)?,
                    None => Item::NONE,
                }));
            }
            StmtKind::If {
                condition,
                then,
                otherwise,
            } => {
                return self.deeper(|replay| {
                    let condition = replay.expr(frame, condition)?;
                    let branch = match replay.truth(&condition)? {
                        Some(true) => then,
                        Some(false) => otherwise,
                        None => replay.likely(frame, stmt, then, otherwise)?,
                    };
                    replay.block(frame, branch)
                });
            }
            StmtKind::For {
                variable,
                over,
                body,
            } => {
                let count = self.loop_length(frame, over)?;
                return self.deeper(|replay| {
                    for i in 0..count {
                        frame.variables.insert(variable.clone(), Item::of(i));
                        replay.step()?;
                        if let Flow::Return(item) = replay.block(frame, body)? {
                            return Ok(Flow::Return(item));
                        }
                    }
                    Ok(Flow::Next)
                });
            }
            StmtKind::While { condition, body } => {
                return self.deeper(|replay| {
                    while replay.continues(frame, condition)? {
                        if let Flow::Return(item) = replay.block(frame, body)? {
                            return Ok(Flow::Return(item));
                        }
                        replay.step()?;
                    }
                    Ok(Flow::Next)
                });
            }
        }
        Ok(Flow::Next)
    }

    /// Evaluates the condition of a loop.
    fn continues(&mut self, frame: &mut Frame, condition: &Expr) -> Result<bool> {
        let condition = self.expr(frame, condition)?;
        self.truth(&condition)?.ok_or_else(|| {
            bad("how often this loop runs depends on data")
                .help("export the model with loops whose length is fixed")
        })
    }

    /// Returns the length of `for i in range(n)`, the only `for` loop that the printer writes.
    fn loop_length(&mut self, frame: &mut Frame, over: &Expr) -> Result<i64> {
        let is_range = |f: &Expr| f.dotted().as_deref() == Some("range");
        let count = match &over.kind {
            ExprKind::Call(call) if is_range(&call.function) => call.args.as_slice(),
            _ => &[],
        };
        let [count] = count else {
            return Err(bad("only `range(n)` can be looped over"));
        };
        let count = self.expr(frame, count)?;
        self.int(&count)?.and_then(|n| n.as_const()).ok_or_else(|| {
            bad("how often this loop runs depends on a size or on data")
                .help("export the model with loops whose length is fixed, or give that size a number: --input NAME:DTYPE[DIMS]")
        })
    }

    /// Returns the branch to take if the condition is unknown. An assertion is taken to hold; anything else is refused.
    fn likely<'s>(
        &mut self,
        frame: &Frame,
        stmt: &Stmt,
        then: &'s [Stmt],
        otherwise: &'s [Stmt],
    ) -> Result<&'s [Stmt]> {
        let raises = |body: &[Stmt]| {
            matches!(body, [Stmt { kind: StmtKind::Expr(Expr { kind: ExprKind::Call(call), .. }), .. }]
                if call.function.dotted().as_deref() == Some("ops.prim.RaiseException"))
        };
        let branch = match (raises(then), raises(otherwise)) {
            (false, true) => then,
            (true, false) => otherwise,
            _ => {
                return Err(bad(
                    "which branch is taken depends on data or on a size that is not fixed",
                )
                .help("trace the model, or give the size a number: --input NAME:DTYPE[DIMS]"));
            }
        };
        self.warnings.push(format!(
            "{}: the program checks something that only a run can tell; it is taken to hold",
            frame.function.place(stmt.line)
        ));
        Ok(branch)
    }

    /// Returns whether a condition holds; nothing if only a run can tell.
    pub(super) fn truth(&mut self, item: &Item) -> Result<Option<bool>> {
        match item {
            Item::Value(Value::Tensor(tensor)) => {
                let known = self.lowering.known_scalar(*tensor)?;
                Ok(known.and_then(|n| scalars::truth(&Value::Int(n))))
            }
            Item::Value(Value::Unknown) => Ok(None),
            Item::Value(value) => match scalars::truth(value) {
                None if !matches!(value, Value::Int(_)) => {
                    Err(bad(format!("{} is no condition", value.kind())))
                }
                truth => Ok(truth),
            },
            Item::Number(n) => Ok(scalars::truth(&Value::Int(n.get()))),
            Item::Real(real) => Ok(Some(real.get().value != 0.0)),
            Item::Ratio(ratio) => Ok(scalars::truth(&Value::Int(ratio.of.clone()))),
            other => Err(bad(format!("{} is no condition", other.kind()))),
        }
    }

    /// Returns `int(x)`; nothing if only a run can tell.
    pub(super) fn int(&mut self, item: &Item) -> Result<Option<Dim>> {
        let value = match item {
            Item::Number(n) => return Ok(Some(n.get())),
            Item::Value(Value::Tensor(tensor)) => return self.lowering.known_scalar(*tensor),
            Item::Real(real) => Value::Float(real.get().value),
            Item::Ratio(ratio) => return Ok(ratio.whole()),
            Item::Value(value) => value.clone(),
            _ => return Ok(None),
        };
        Ok(match scalars::to_int(&value)? {
            Value::Int(n) => Some(n),
            _ => None,
        })
    }

    pub(super) fn expr(&mut self, frame: &mut Frame, expr: &Expr) -> Result<Item> {
        self.deeper(|replay| replay.inner_expr(frame, expr))
    }

    fn inner_expr(&mut self, frame: &mut Frame, expr: &Expr) -> Result<Item> {
        if let Some(item) = Item::literal(&expr.kind) {
            return Ok(item);
        }
        match &expr.kind {
            ExprKind::Negative(of) => {
                let item = self.expr(frame, of)?;
                let negative = match &item {
                    Item::Value(v) => scalars::evaluate("neg", std::slice::from_ref(v))?,
                    _ => None,
                };
                let negative = negative.map(Item::Value);
                negative.ok_or_else(|| bad(format!("{} has no negative", item.kind())))
            }
            ExprKind::List(items) => {
                let items = self.exprs(frame, items)?;
                self.containers.add(Content::List(items))
            }
            ExprKind::Tuple(items) => {
                let items = self.exprs(frame, items)?;
                self.containers.add(Content::Tuple(items))
            }
            ExprKind::Dict(items) => {
                let mut pairs = Vec::with_capacity(items.len());
                for (key, value) in items {
                    pairs.push((self.expr(frame, key)?, self.expr(frame, value)?));
                }
                self.containers.add(Content::Dict(pairs))
            }
            ExprKind::Name(name) => self.name(frame, name),
            ExprKind::Attribute(of, name) => self.attribute(frame, expr, of, name),
            ExprKind::Subscript(of, index) => {
                let of = self.expr(frame, of)?;
                let index = self.expr(frame, index)?;
                self.member(&of, &index)
            }
            ExprKind::Call(call) => self.call_expr(frame, call),
            _ => Err(Error::bug("torchscript", "a literal has no value")),
        }
    }

    pub(super) fn exprs(&mut self, frame: &mut Frame, exprs: &[Expr]) -> Result<Vec<Item>> {
        exprs.iter().map(|e| self.expr(frame, e)).collect()
    }

    fn name(&self, frame: &Frame, name: &Name) -> Result<Item> {
        if let Some(item) = frame.variables.get(name) {
            return Ok(item.clone());
        }
        match &**name {
            "inf" => Ok(Item::of(f64::INFINITY)),
            "nan" => Ok(Item::of(f64::NAN)),
            _ => Err(bad(format!("there is no variable `{name}`"))),
        }
    }

    /// Returns true if a name is a variable here.
    pub(super) fn is_variable(frame: &Frame, name: &str) -> bool {
        frame.variables.contains_key(name)
    }

    fn attribute(
        &mut self,
        frame: &mut Frame,
        whole: &Expr,
        of: &Expr,
        name: &Name,
    ) -> Result<Item> {
        if let Some(dotted) = whole.dotted() {
            let root = dotted.split('.').next().unwrap_or("");
            if !Self::is_variable(frame, root) {
                return match root {
                    "CONSTANTS" => self.constant(name),
                    "__torch__" => Ok(Item::Function(dotted.into())),
                    "torch" if matches!(&**name, "inf" | "nan") => self.name(frame, name),
                    _ => Err(bad(format!("there is no `{dotted}`"))),
                };
            }
        }
        let of = self.expr(frame, of)?;
        self.attribute_of(&of, name)
    }
}
