//! What a user says about a model beside its file: types of inputs and names of outputs, for formats that have none.

use ckpt_passes::ir::{DType, Graph, Ty};
use ckpt_passes::{Error, Result, text};
use std::collections::BTreeMap;

/// The type of one graph input, said by the user: `x:f32[batch, 3, 224]`.
#[derive(Clone, Debug, PartialEq)]
pub struct InputType {
    /// Name of the graph input, as the model has it.
    pub name: String,
    /// Its element type and sizes; named sizes are allowed.
    pub ty: Ty,
}

impl InputType {
    /// Reads `NAME:DTYPE[DIMS]`; a scalar is `NAME:DTYPE` or `NAME:DTYPE[]`.
    ///
    /// # Errors
    /// `error[input]`, which says what part is wrong.
    pub fn parse(wish: &str) -> Result<InputType> {
        let bad = |what: String| {
            Error::usage("input", what)
                .expected("NAME:DTYPE[DIMS], such as x:f32[batch,3,224]")
                .found(wish)
        };
        let (head, dims) = match wish.strip_suffix(']').and_then(|w| w.rsplit_once('[')) {
            Some((head, dims)) => (head, dims),
            None => (wish, ""),
        };
        let (name, word) = head
            .rsplit_once(':')
            .ok_or_else(|| bad("the type of an input has no `:`".into()))?;
        if name.is_empty() {
            return Err(bad("the input has no name".into()));
        }
        let dtype = dtype(word).ok_or_else(|| bad(format!("`{word}` is not an element type")))?;
        let mut sizes = Vec::new();
        for part in dims.split(',').map(str::trim).filter(|d| !d.is_empty()) {
            let dim = text::parse_dim(part)
                .map_err(|e| bad(format!("`{part}` is not a size: {}", e.message())))?;
            if dim.as_const().is_some_and(|n| n < 0) {
                return Err(bad(format!("a size cannot be {part}")));
            }
            sizes.push(dim);
        }
        Ok(InputType {
            name: name.into(),
            ty: Ty::new(dtype, sizes),
        })
    }
}

impl std::fmt::Display for InputType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dims: Vec<String> = self.ty.dims.iter().map(|d| d.to_string()).collect();
        write!(f, "{}:{}[{}]", self.name, self.ty.dtype, dims.join(","))
    }
}

/// Our word for an element type, or NumPy's.
fn dtype(word: &str) -> Option<DType> {
    let ours = match word {
        "float32" | "float" => "f32",
        "float64" | "double" => "f64",
        "float16" => "f16",
        "bfloat16" => "bf16",
        "int64" => "i64",
        "int32" => "i32",
        "int16" => "i16",
        "int8" => "i8",
        "uint64" => "u64",
        "uint32" => "u32",
        "uint16" => "u16",
        "uint8" => "u8",
        word => word,
    };
    DType::from_name(ours)
}

/// Everything a user says about a model beside its file.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Types that count whatever the file says.
    pub inputs: Vec<InputType>,
    /// Types of example inputs, by name: they count where neither `inputs` nor the file has a type. Names that no input
    /// has are not looked at.
    pub examples: BTreeMap<String, Ty>,
    /// Names of all outputs, in order; empty: the file's.
    pub output_names: Vec<String>,
}

impl Given {
    /// The type of an input.
    pub fn type_of(&self, name: &str) -> Option<&Ty> {
        let said = self.inputs.iter().find(|i| i.name == name).map(|i| &i.ty);
        said.or_else(|| self.examples.get(name))
    }

    /// Whether there is a type for an input of that name or for members of it (`name.0`).
    pub fn speaks_of(&self, name: &str) -> bool {
        let of = |known: &str| {
            known
                .strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.inputs.iter().any(|i| of(&i.name)) || self.examples.keys().any(|k| of(k))
    }

    /// The given names of `count` outputs, or `other`.
    ///
    /// # Errors
    /// Another number of names.
    pub fn output_names_or(
        &self,
        count: usize,
        other: impl Fn(usize) -> String,
    ) -> Result<Vec<String>> {
        if self.output_names.is_empty() {
            return Ok((0..count).map(other).collect());
        }
        if self.output_names.len() != count {
            return Err(
                Error::usage("output-names", "the model has another number of outputs")
                    .expected(format!("{count} names"))
                    .found(self.output_names.join(", ")),
            );
        }
        Ok(self.output_names.clone())
    }

    /// Sets the given types of inputs in a graph.
    ///
    /// # Errors
    /// A name that no input of the graph has.
    pub fn set_types(&self, graph: &mut Graph) -> Result<()> {
        for InputType { name, ty } in &self.inputs {
            let ids = graph.inputs();
            let Some(id) = ids.iter().find(|v| graph.value(**v).name == *name) else {
                let known: Vec<&str> = ids.iter().map(|v| graph.value(*v).name.as_str()).collect();
                return Err(
                    Error::usage("input", format!("the model has no input `{name}`"))
                        .found(format!("inputs {}", known.join(", "))),
                );
            };
            graph.set_type(*id, ty.clone());
        }
        Ok(())
    }

    /// Reads back what [`record`] wrote.
    ///
    /// # Errors
    /// Metadata that is not a JSON list of input types or names.
    pub fn recorded(meta: &BTreeMap<String, String>) -> Result<Given> {
        let inputs = read_list(meta, INPUT_KEY)?;
        Ok(Given {
            inputs: inputs
                .iter()
                .map(|t| InputType::parse(t))
                .collect::<Result<_>>()?,
            output_names: read_list(meta, OUTPUT_NAMES_KEY)?,
            ..Given::default()
        })
    }

    /// Fails where outputs are named though the format, `format`, names them itself.
    ///
    /// # Errors
    /// See above.
    pub fn refuse_output_names(&self, format: &str) -> Result<()> {
        match self.output_names.as_slice() {
            [] => Ok(()),
            _ => Err(Error::usage(
                "output-names",
                format!(
                    "{format} names its outputs itself: --output-names is for files that do not"
                ),
            )),
        }
    }
}

/// Key of a graph's metadata: a JSON list of `NAME:DTYPE[DIMS]`, the types that the user gave.
pub const INPUT_KEY: &str = "ckpt.input";
/// Key of a graph's metadata: a JSON list of the names that the user gave to outputs.
pub const OUTPUT_NAMES_KEY: &str = "ckpt.output_names";

/// Writes given types and output names into a graph's metadata; empty lists leave no entry.
pub fn record(types: &[InputType], output_names: &[String], meta: &mut BTreeMap<String, String>) {
    let types: Vec<String> = types.iter().map(InputType::to_string).collect();
    for (key, list) in [
        (INPUT_KEY, types.as_slice()),
        (OUTPUT_NAMES_KEY, output_names),
    ] {
        if !list.is_empty() {
            meta.insert(key.into(), list_text(list));
        }
    }
}

/// Formats a list of strings as JSON, for metadata.
pub fn list_text(list: &[String]) -> String {
    serde_json::to_string(list).unwrap_or_default()
}

/// Reads a list of strings from metadata; an absent key is an empty list.
///
/// # Errors
/// A text that is not a JSON list of strings.
pub fn read_list(meta: &BTreeMap<String, String>, key: &str) -> Result<Vec<String>> {
    meta.get(key).map_or(Ok(Vec::new()), |t| {
        serde_json::from_str(t).map_err(|e| {
            let what = format!("metadata `{key}` is not a JSON list of strings: {e}");
            Error::model("record", what)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_types() {
        let parsed = InputType::parse("x:0:f32[batch, 3, seq+1]").unwrap();
        assert_eq!(parsed.name, "x:0");
        assert_eq!((parsed.ty.dtype, parsed.ty.rank()), (DType::F32, 3));
        assert_eq!(InputType::parse(&parsed.to_string()).unwrap(), parsed);
        assert_eq!(InputType::parse("s:int64").unwrap().ty.rank(), 0);
        for wrong in [
            "",
            "x",
            ":f32[1]",
            "x:f31[1]",
            "x:f32[1",
            "x:f32[-1]",
            "x:f32[a b]",
        ] {
            assert_eq!(
                InputType::parse(wrong).unwrap_err().exit_code(),
                2,
                "{wrong}"
            );
        }
    }
}
