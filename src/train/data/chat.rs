//! Chats as text, by a Jinja template, and which part of it the assistant says.
//!
//! A template is rendered for the whole chat, and up to and including each message of the assistant. What the assistant
//! says is where these agree: from the end of the prompt for it to the end of its message.

use ckpt_passes::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, context};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;

const NAME: &str = "chat";

/// A chat as text.
pub(super) struct Chat {
    pub text: String,
    /// Bytes that the assistant says.
    pub learned: Vec<Range<usize>>,
}

/// A template of chats.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Tokens that templates name, such as `bos_token`.
    tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Parses a template, with the settings that Hugging Face's libraries use.
    ///
    /// # Errors
    /// A template that is not valid.
    pub fn new(source: &str, tokens: BTreeMap<String, String>) -> Result<ChatTemplate> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|e| refused("is not valid", &e))?);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |text: String| -> Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
            },
        );
        environment.add_filter(
            "tojson",
            |value: minijinja::Value| -> Result<String, minijinja::Error> {
                python_json(&value)
                    .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))
            },
        );
        environment
            .add_template_owned(NAME, without_generation(source))
            .map_err(|e| refused("is not valid", &e))?;
        Ok(ChatTemplate {
            environment,
            tokens,
        })
    }

    /// Renders a chat.
    ///
    /// # Errors
    /// Messages of another form, or that the template refuses; a template under which it is not clear what the assistant
    /// says.
    pub fn render(&self, messages: &Value, tools: Option<&Value>) -> Result<Chat> {
        let all = messages.as_array().filter(|all| !all.is_empty()).ok_or_else(|| {
            Error::usage("data", "`messages` is no list of messages")
                .expected("[{\"role\": \"user\", \"content\": \"…\"}, {\"role\": \"assistant\", \"content\": \"…\"}]")
        })?;
        let text = self.text(all, tools, false)?;
        let mut learned = Vec::new();
        for (i, message) in all.iter().enumerate() {
            let role = message.get("role").and_then(Value::as_str).ok_or_else(|| {
                Error::usage("data", format!("message {} has no role", i + 1))
                    .expected("a `role` that is a text")
            })?;
            if role != "assistant" {
                continue;
            }
            let begin = match i {
                0 => 0,
                _ => shared(&text, &self.text(&all[..i], tools, true)?),
            };
            let end = match i + 1 == all.len() {
                true => text.len(),
                false => shared(&text, &self.text(&all[..=i], tools, false)?),
            };
            if begin >= end {
                return Err(Error::usage("chat-template", format!("it is not clear where message {} is", i + 1))
                    .expected("a template under which earlier messages stay as they are")
                    .help("use a template that does not change messages of the assistant when others follow"));
            }
            learned.push(begin..end);
        }
        Ok(Chat { text, learned })
    }

    fn text(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let tokens = minijinja::Value::from(Serde(&self.tokens));
        let context = context! { messages => Serde(messages), tools => tools.map(Serde), add_generation_prompt, ..tokens };
        let template = self.environment.get_template(NAME);
        let rendered = template.and_then(|template| template.render(context));
        rendered.map_err(|e| refused("refuses this chat", &e))
    }
}

fn refused(what: &str, e: &minijinja::Error) -> Box<Error> {
    Error::usage("chat-template", format!("the chat template {what}")).found(e.to_string())
}

/// Returns how many bytes two texts begin with alike.
fn shared(a: &str, b: &str) -> usize {
    let mut same = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    while !a.is_char_boundary(same) {
        same -= 1;
    }
    same
}

/// Returns JSON as Python writes it, with a space after each comma and colon.
fn python_json(value: &minijinja::Value) -> serde_json::Result<String> {
    struct Spaced;
    impl serde_json::ser::Formatter for Spaced {
        fn begin_array_value<W: ?Sized + std::io::Write>(
            &mut self,
            out: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_key<W: ?Sized + std::io::Write>(
            &mut self,
            out: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_value<W: ?Sized + std::io::Write>(
            &mut self,
            out: &mut W,
        ) -> std::io::Result<()> {
            out.write_all(b": ")
        }
    }
    let mut bytes = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(
        &mut bytes, Spaced,
    ))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns a template without the tags `generation` and `endgeneration`, which say what the assistant says. Their marks for
/// white space stay.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_matches(|c: char| "{%-+}".contains(c) || c.is_whitespace());
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CHATML: &str = "{%- for m in messages %}<|{{ m['role'] }}|>\n{% generation %}{{ m.content.strip() }}{% endgeneration %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(
            source,
            BTreeMap::from([("eos_token".into(), "</s>".into())]),
        )
        .unwrap()
    }

    #[test]
    fn what_the_assistant_says_is_found() {
        let messages = json!([
            {"role": "user", "content": "hé"},
            {"role": "assistant", "content": " hö "},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "last"},
        ]);
        let chat = template(CHATML).render(&messages, None).unwrap();
        let said: Vec<&str> = chat.learned.iter().map(|r| &chat.text[r.clone()]).collect();
        assert_eq!(said, ["hö<|end|>\n", "last<|end|>\n"]);
        let only_user = json!([{"role": "user", "content": "x"}]);
        assert!(
            template(CHATML)
                .render(&only_user, None)
                .unwrap()
                .learned
                .is_empty()
        );
    }

    #[test]
    fn templates_that_refuse_or_change_messages_are_errors() {
        let messages =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        let refuses = template("{{ raise_exception('roles must alternate') }}");
        let e = refuses.render(&messages, None).err().unwrap();
        assert!(e.to_string().contains("roles must alternate"), "{e}");
        // Nothing of what is said before stays.
        let changes = template("{{ messages | length }}{{ messages[-1].content }}{{ eos_token }}");
        let long = json!([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]);
        assert_eq!(
            changes.render(&long, None).err().unwrap().code(),
            "chat-template"
        );
        for wrong in [
            json!(3),
            json!([]),
            json!([{"content": "x"}]),
            json!([{"role": 1}]),
            json!([null]),
        ] {
            assert_eq!(
                template(CHATML)
                    .render(&wrong, None)
                    .err()
                    .unwrap()
                    .exit_code(),
                2,
                "{wrong}"
            );
        }
        assert!(ChatTemplate::new("{% for %}", BTreeMap::new()).is_err());
        assert!(ChatTemplate::new("{% generation", BTreeMap::new()).is_err());
    }

    #[test]
    fn tools_are_json_as_python_writes_it() {
        let tools = json!([{"name": "<f>", "n": [1, 2]}]);
        let template = template("{{ tools | tojson }}");
        let messages = json!([{"role": "user", "content": "a"}]);
        let text = template.render(&messages, Some(&tools)).unwrap().text;
        assert_eq!(text, r#"[{"n": [1, 2], "name": "<f>"}]"#);
    }
}
