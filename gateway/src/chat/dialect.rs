//! How the generations of the model family write tool calls.

use super::markers::Marker;

/// How a model writes its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// DSML markup.
    #[default]
    V32,
    /// Tool tokens: V3.1 and V3.2-Exp.
    V31,
    /// Tool tokens around fenced JSON: V3 and R1.
    V3,
}

impl Dialect {
    /// The markers that outputs of this dialect are made of.
    pub fn markers(self) -> &'static [Marker] {
        match self {
            Self::V32 => Marker::DSML_SET,
            Self::V31 | Self::V3 => Marker::LEGACY_SET,
        }
    }
}
