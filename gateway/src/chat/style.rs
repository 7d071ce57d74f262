//! Which member of the model family is served: what its prompts look like, how it writes calls, whether it reasons.

use super::dialect::Dialect;

/// Whether a model reasons before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Thinking {
    /// As the request wants it.
    #[default]
    Switched,
    /// In every answer; the model opens its reasoning itself.
    Always,
    /// In none.
    Never,
}

/// How a model speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    pub dialect: Dialect,
    pub thinking: Thinking,
    /// Whether a request that does not say so thinks.
    pub thinks_by_default: bool,
    /// Why tools are refused, where they are.
    pub refuses_tools: Option<&'static str>,
}

impl Default for Style {
    fn default() -> Self {
        Self::V32
    }
}

/// What a model folder says about its model.
#[derive(Debug, Clone, Copy)]
pub struct ModelTraits<'a> {
    /// The folder's name.
    pub name: &'a str,
    /// `model_type` of its config.json.
    pub model_type: &'a str,
    /// Whether its tokenizer has the marker of DSML, and the think tokens.
    pub has_dsml: bool,
    pub has_think: bool,
}

impl Style {
    /// DeepSeek-V3.2.
    pub const V32: Self =
        Self { dialect: Dialect::V32, thinking: Thinking::Switched, thinks_by_default: false, refuses_tools: None };
    /// V3.2-Speciale was trained to reason, and not to call.
    const SPECIALE: Self = Self {
        thinks_by_default: true,
        refuses_tools: Some("DeepSeek-V3.2-Speciale was not trained to call tools; use DeepSeek-V3.2"),
        ..Self::V32
    };
    /// V3.1 and V3.2-Exp.
    const V31: Self = Self { dialect: Dialect::V31, ..Self::V32 };
    /// V3 and V3-0324.
    const V3: Self = Self { dialect: Dialect::V3, thinking: Thinking::Never, ..Self::V32 };
    /// R1 and R1-0528.
    const R1: Self = Self { dialect: Dialect::V3, thinking: Thinking::Always, thinks_by_default: true, ..Self::V32 };

    /// The style of a model, by its name where that tells the generation, else by what its tokenizer can write.
    #[must_use]
    pub fn of(model: ModelTraits<'_>) -> Self {
        let name = model.name.to_ascii_lowercase().replace('_', "-").replace("v3-2-", "v3.2-");
        let says = |text: &str| name.contains(text);
        if says("v3.2-exp") || says("v32-exp") {
            Self::V31
        } else if says("speciale") {
            Self::SPECIALE
        } else if says("v3.2") || says("v32") {
            Self::V32
        } else if says("v3.1") || says("v31") {
            Self::V31
        } else if says("deepseek-r1") {
            Self::R1
        } else if says("deepseek-v3") {
            Self::V3
        } else {
            match (model.has_dsml, model.has_think, model.model_type) {
                (true, _, _) => Self::V32,
                (false, true, _) | (false, false, "deepseek_v32") => Self::V31,
                (false, false, _) => Self::V3,
            }
        }
    }

    /// With what an operator has said instead. Whoever changes how calls are written answers for the tools.
    #[must_use]
    pub fn with(mut self, chosen: StyleChoice) -> Self {
        if let Some(dialect) = chosen.dialect {
            self = Self { dialect, refuses_tools: self.refuses_tools.filter(|_| dialect == self.dialect), ..self };
        }
        if let Some(thinking) = chosen.thinking {
            let by_default = thinking == Thinking::Always || (thinking == self.thinking && self.thinks_by_default);
            self = Self { thinking, thinks_by_default: by_default, ..self };
        }
        self
    }
}

/// What an operator says about the model; the rest is read off it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StyleChoice {
    pub dialect: Option<Dialect>,
    pub thinking: Option<Thinking>,
}

#[cfg(test)]
mod tests {
    use super::{ModelTraits, Style, StyleChoice, Thinking};
    use crate::chat::dialect::Dialect;

    #[test]
    fn the_name_tells_the_generation() {
        let cases = [
            ("DeepSeek-V3.2", Style::V32),
            ("DeepSeek-V3.2-Exp", Style::V31),
            ("deepseek_v3_2_exp", Style::V31),
            ("DeepSeek-V3.2-Speciale", Style::SPECIALE),
            ("DeepSeek-V3.1", Style::V31),
            ("DeepSeek-V3.1-Terminus", Style::V31),
            ("DeepSeek-V3-0324", Style::V3),
            ("DeepSeek-V3-2bit", Style::V3),
            ("DeepSeek-V3", Style::V3),
            ("DeepSeek-R1", Style::R1),
            ("DeepSeek-R1-0528", Style::R1),
        ];
        for (name, style) in cases {
            let traits = ModelTraits { name, model_type: "deepseek_v3", has_dsml: true, has_think: true };
            assert_eq!(Style::of(traits), style, "{name}");
        }
    }

    #[test]
    fn a_name_that_tells_nothing_leaves_it_to_the_tokenizer() {
        let style =
            |model_type, has_dsml, has_think| Style::of(ModelTraits { name: "micro", model_type, has_dsml, has_think });
        assert_eq!(style("deepseek_v32", true, true), Style::V32);
        assert_eq!(style("deepseek_v32", false, true), Style::V31);
        assert_eq!(style("deepseek_v3", false, true), Style::V31);
        assert_eq!(style("deepseek_v3", false, false), Style::V3);
    }

    #[test]
    fn an_operator_overrides_either_part() {
        let chosen = StyleChoice { dialect: Some(Dialect::V3), thinking: None };
        assert_eq!(Style::V32.with(chosen), Style { dialect: Dialect::V3, ..Style::V32 });
        assert_eq!(Style::SPECIALE.with(chosen).refuses_tools, None);
        let chosen = StyleChoice { dialect: None, thinking: Some(Thinking::Always) };
        let style = Style::V31.with(chosen);
        assert!(style.thinks_by_default);
        assert_eq!(style.dialect, Dialect::V31);
        assert_eq!(Style::SPECIALE.with(StyleChoice::default()), Style::SPECIALE);
    }
}
