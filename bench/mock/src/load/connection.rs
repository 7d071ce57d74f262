//! One HTTP/1.1 connection of the client, no more than a measurement needs: it reads whole answers and event streams,
//! and costs little itself.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, bail};
use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;

const MAX_HEAD_BYTES: usize = 16 * 1024;

/// What came back for one request.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    pub status: u16,
    /// Events of a stream that carried text.
    pub events: u32,
    /// Reads from the socket that brought tokens: writes of the server, seen from here.
    pub reads: u32,
    pub first_byte: Option<Instant>,
    /// Whether it says when to come again.
    pub has_retry_after: bool,
    pub end: Instant,
}

impl Answer {
    /// Nothing that can be read.
    pub fn broken() -> Self {
        Self { status: 0, events: 0, reads: 0, first_byte: None, has_retry_after: false, end: Instant::now() }
    }
}

/// See the module.
pub struct Connection {
    from: Ipv4Addr,
    to: SocketAddr,
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// What the head of an answer says.
struct Head {
    status: u16,
    length: Length,
    has_retry_after: bool,
    /// Whether the connection ends with it.
    closes: bool,
}

/// How far the body of an answer goes.
enum Length {
    Known(usize),
    Chunked,
}

impl Connection {
    pub async fn open(from: Ipv4Addr, to: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self { from, to, stream: connect(from, to).await?, buffer: Vec::with_capacity(1024) })
    }

    /// Starts over after an answer that could not be read to its end.
    pub async fn reopen(&mut self) -> anyhow::Result<()> {
        self.buffer.clear();
        self.stream = connect(self.from, self.to).await?;
        Ok(())
    }

    /// Sends a request and reads its answer. Microseconds between reads of tokens are added to `gaps_us`.
    pub async fn ask(&mut self, request: &[u8], gaps_us: &mut Vec<u32>) -> anyhow::Result<Answer> {
        self.stream.write_all(request).await?;
        let head_len = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end + 4;
            }
            if self.buffer.len() > MAX_HEAD_BYTES {
                bail!("the head of an answer has no end");
            }
            self.read_some().await?;
        };
        let first_byte = Instant::now();
        let Head { status, length, has_retry_after, closes } = parse_head(&self.buffer[..head_len])?;
        self.buffer.drain(..head_len);
        let (events, reads) = match length {
            Length::Known(num_bytes) => {
                while self.buffer.len() < num_bytes {
                    self.read_some().await?;
                }
                self.buffer.drain(..num_bytes);
                (0, 0)
            }
            Length::Chunked => self.read_events(gaps_us).await?,
        };
        let end = Instant::now();
        let answer = Answer { status, events, reads, first_byte: Some(first_byte), has_retry_after, end };
        if closes {
            self.reopen().await?;
        }
        Ok(answer)
    }

    /// Reads chunks to the last one and counts the events with content in them.
    async fn read_events(&mut self, gaps_us: &mut Vec<u32>) -> anyhow::Result<(u32, u32)> {
        let (mut events, mut reads, mut last) = (0, 0, None::<Instant>);
        loop {
            // The event that opens an answer has an empty one.
            let fresh = count(&self.buffer, b"\"content\":\"") - count(&self.buffer, b"\"content\":\"\"");
            let ended = self.buffer.ends_with(b"0\r\n\r\n");
            if fresh > 0 {
                let now = Instant::now();
                if let Some(last) = last.replace(now) {
                    gaps_us.push(u32::try_from((now - last).as_micros()).unwrap_or(u32::MAX));
                }
                events += fresh;
                reads += 1;
            }
            // An event that is cut at the end of a read is rare and counted with the next one or not at all.
            self.buffer.clear();
            if ended {
                return Ok((events, reads));
            }
            self.read_some().await?;
        }
    }

    async fn read_some(&mut self) -> anyhow::Result<()> {
        if self.stream.read_buf(&mut self.buffer).await? == 0 {
            bail!("the connection was closed within an answer");
        }
        Ok(())
    }
}

async fn connect(from: Ipv4Addr, to: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_nodelay(true)?;
    socket.bind(SocketAddr::from((from, 0)))?;
    socket.connect(to).await.with_context(|| format!("nothing answers at {to}"))
}

/// Puts a whole request into `bytes`.
pub fn write_request(bytes: &mut Vec<u8>, body: &[u8], key: Option<&str>) {
    bytes.clear();
    bytes.extend_from_slice(b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n");
    // Writing to memory does not fail.
    if let Some(key) = key {
        let _ = write!(bytes, "authorization: Bearer {key}\r\n");
    }
    let _ = write!(bytes, "content-length: {}\r\n\r\n", body.len());
    bytes.extend_from_slice(body);
}

fn parse_head(head: &[u8]) -> anyhow::Result<Head> {
    let head = std::str::from_utf8(head)?.to_ascii_lowercase();
    let status = head.get(9..12).and_then(|digits| digits.parse().ok()).context("no status line")?;
    let field = |name: &str| {
        head.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':').map(str::trim))
    };
    let length = match field("content-length").map(str::parse) {
        Some(length) => Length::Known(length?),
        None if field("transfer-encoding") == Some("chunked") => Length::Chunked,
        None => bail!("an answer without a length"),
    };
    let closes = field("connection") == Some("close");
    Ok(Head { status, length, has_retry_after: field("retry-after").is_some(), closes })
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    memmem::find(bytes, wanted)
}

/// How often `wanted` occurs.
fn count(bytes: &[u8], wanted: &[u8]) -> u32 {
    u32::try_from(memmem::find_iter(bytes, wanted).count()).unwrap_or(u32::MAX)
}
