//! Lines from a person or a pipe.

use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};

const MAX_HISTORY: usize = 1000;

/// What was typed.
pub(super) enum Line {
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the end of the pipe.
    End,
}

/// See the module.
pub(super) enum Input {
    Person { editor: Box<Editor<(), FileHistory>>, history: Option<PathBuf> },
    Pipe(std::io::StdinLock<'static>),
}

impl Input {
    /// A person where both standard input and output are a terminal.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub(super) fn new() -> anyhow::Result<Self> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Ok(Self::Pipe(std::io::stdin().lock()));
        }
        let config = Config::builder().max_history_size(MAX_HISTORY)?.history_ignore_space(true).build();
        let mut editor = Box::new(Editor::with_config(config)?);
        let history = history_path();
        if let Some(path) = &history {
            // There is none at the first time.
            let _ = editor.load_history(path);
        }
        Ok(Self::Person { editor, history })
    }

    pub(super) fn is_interactive(&self) -> bool {
        matches!(self, Self::Person { .. })
    }

    /// The next line. A pipe is not prompted.
    ///
    /// # Errors
    /// The terminal or the pipe cannot be read.
    pub(super) fn read(&mut self, prompt: &str) -> anyhow::Result<Line> {
        match self {
            Self::Person { editor, .. } => match editor.readline(prompt) {
                Ok(line) => {
                    editor.add_history_entry(&line)?;
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(error.into()),
            },
            Self::Pipe(stdin) => {
                let mut line = String::new();
                if stdin.read_line(&mut line)? == 0 {
                    return Ok(Line::End);
                }
                Ok(Line::Text(line.trim_end_matches(['\r', '\n']).to_owned()))
            }
        }
    }

    /// Keeps the history for the next time.
    pub(super) fn save(&mut self) {
        if let Self::Person { editor, history: Some(path) } = self {
            // A home that cannot be written to costs the history and nothing else.
            let _ = path.parent().map(std::fs::create_dir_all);
            let _ = editor.save_history(path);
        }
    }
}

/// `$XDG_STATE_HOME/baleen/chat_history`; the library makes it readable for its owner only.
fn history_path() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(state.join("baleen/chat_history"))
}
