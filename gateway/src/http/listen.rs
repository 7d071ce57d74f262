//! Accepts connections and serves the routes on them, with limits on what a client may withhold: headers, and reading.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Sleep;
use tracing::{debug, warn};

/// A request's headers arrive within this time; it is also how long an idle connection is kept.
const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// A client that takes nothing for this long is cut off, so that it holds neither its permit nor its pages.
const WRITE_STALL_LIMIT: Duration = Duration::from_secs(30);
const MAX_HEADERS: usize = 100;
const MAX_HEADER_BYTES: u32 = 32 * 1024;
const MAX_BUFFER_BYTES: usize = 64 * 1024;
const MAX_STREAMS_PER_CONNECTION: u32 = 100;
/// What open connections get to finish their last response in once serving stops.
const CLOSE_GRACE: Duration = Duration::from_millis(500);

/// The first bytes of every HTTP/2 connection; no method of HTTP/1 begins so.
const HTTP2_PREFACE: &[u8; 3] = b"PRI";
/// How long the rest of a preface is waited for before it is looked for again.
const PREFACE_PAUSE: Duration = Duration::from_millis(10);

/// Serves `routes` until `stop` turns true, then lets open connections finish what they are writing.
pub async fn serve(listener: TcpListener, routes: Router, mut stop: watch::Receiver<bool>) {
    let protocols = Arc::new(Protocols::new());
    let open = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Too many open files, or a client that left at once: neither is a reason to stop.
                warn!(%error, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "TCP_NODELAY could not be set");
        }
        let (protocols, routes, watcher, stop) = (protocols.clone(), routes.clone(), open.watcher(), stop.clone());
        tokio::spawn(async move {
            // Boxed, as is the rarer protocol: what remains for the life of most connections stays small.
            let is_http2 = Box::pin(speaks_http2(&stream, stop)).await;
            match is_http2 {
                Some(false) => note(watcher.watch(protocols.http1(stream, routes)).await),
                Some(true) => note(Box::pin(watcher.watch(protocols.http2(stream, routes))).await),
                None => debug!("a connection ended before its first request"),
            }
        });
    }
    drop(listener);
    if tokio::time::timeout(CLOSE_GRACE, open.shutdown()).await.is_err() {
        debug!("connections were still open at the end");
    }
}

fn note(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        debug!(%error, "a connection ended early");
    }
}

/// Which protocol the client speaks, without taking a byte of it: what is read ahead of HTTP/1's own buffer makes that
/// buffer double. `None` where the client leaves or says nothing, or serving stops.
async fn speaks_http2(stream: &TcpStream, mut stop: watch::Receiver<bool>) -> Option<bool> {
    let look = async {
        loop {
            let mut start = [0; HTTP2_PREFACE.len()];
            let num_bytes = stream.peek(&mut start).await.ok().filter(|num_bytes| *num_bytes > 0)?;
            if start[..num_bytes] != HTTP2_PREFACE[..num_bytes] {
                return Some(false);
            }
            if num_bytes == start.len() {
                return Some(true);
            }
            tokio::time::sleep(PREFACE_PAUSE).await;
        }
    };
    tokio::select! {
        found = tokio::time::timeout(HEADER_TIMEOUT, look) => found.ok().flatten(),
        _ = stop.wait_for(|stop| *stop) => None,
    }
}

/// How connections are served, by protocol.
struct Protocols {
    http1: http1::Builder,
    http2: http2::Builder<TokioExecutor>,
}

type Socket = TokioIo<Unstalled>;
type Service = TowerToHyperService<Router>;

impl Protocols {
    fn new() -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .max_headers(MAX_HEADERS)
            // A streamed token is three slices of some two hundred bytes: copying them costs less than a gathering
            // write.
            .writev(false)
            .max_buf_size(MAX_BUFFER_BYTES);
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
            .max_header_list_size(MAX_HEADER_BYTES)
            .max_pending_accept_reset_streams(20)
            .keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(20));
        Self { http1, http2 }
    }

    fn http1(&self, stream: TcpStream, routes: Router) -> http1::Connection<Socket, Service> {
        self.http1.serve_connection(socket(stream), TowerToHyperService::new(routes))
    }

    fn http2(&self, stream: TcpStream, routes: Router) -> http2::Connection<Socket, Service, TokioExecutor> {
        self.http2.serve_connection(socket(stream), TowerToHyperService::new(routes))
    }
}

fn socket(stream: TcpStream) -> Socket {
    TokioIo::new(Unstalled::new(stream, WRITE_STALL_LIMIT))
}

/// A socket that fails once a write has made no progress for `limit`.
struct Unstalled {
    stream: TcpStream,
    limit: Duration,
    /// Armed while the socket is full.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Unstalled {
    fn new(stream: TcpStream, limit: Duration) -> Self {
        Self { stream, limit, stalled: None }
    }

    fn watch<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.limit;
        let sleep = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        match sleep.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Unstalled {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Unstalled {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.watch(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    static CHUNK: [u8; 65536] = [0; 65536];
    const NUM_CHUNKS: usize = 256;

    async fn pair(limit: Duration) -> (Unstalled, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Unstalled::new(listener.accept().await.unwrap().0, limit), client)
    }

    async fn write_all(server: &mut Unstalled) -> io::Result<()> {
        for _ in 0..NUM_CHUNKS {
            server.write_all(&CHUNK).await?;
        }
        Ok(())
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_cut_off() {
        let (mut server, _client) = pair(Duration::from_millis(100)).await;
        assert_eq!(write_all(&mut server).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_client_that_takes_now_and_then_is_served() {
        let (mut server, mut client) = pair(WRITE_STALL_LIMIT).await;
        let writing = tokio::spawn(async move { write_all(&mut server).await });
        let mut buffer = vec![0; 4 << 20];
        let mut taken = 0;
        while taken < NUM_CHUNKS * CHUNK.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            taken += client.read(&mut buffer).await.unwrap();
        }
        writing.await.unwrap().unwrap();
    }

    /// What a server with no routes answers to `pieces`, each sent by itself, as far as `wanted` bytes.
    async fn answer_to(pieces: &[&[u8]], wanted: usize) -> Vec<u8> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.set_nodelay(true).unwrap();
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(serve(listener, Router::new(), stopped));
        for piece in pieces {
            client.write_all(piece).await.unwrap();
            tokio::time::sleep(PREFACE_PAUSE / 2).await;
        }
        let mut answer = vec![0; wanted];
        client.read_exact(&mut answer).await.unwrap();
        stop.send(true).unwrap();
        serving.await.unwrap();
        answer
    }

    #[tokio::test]
    async fn the_first_bytes_tell_the_protocol_however_they_arrive() {
        let get: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        let put: [&[u8]; 3] = [b"P", b"U", b"T / HTTP/1.1\r\nhost: a\r\n\r\n"];
        for pieces in [&[get][..], &put[..]] {
            assert_eq!(answer_to(pieces, 12).await, b"HTTP/1.1 404");
        }
        let settings: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
        let whole: [&[u8]; 2] = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", settings];
        let cut: [&[u8]; 4] = [b"P", b"RI", b" * HTTP/2.0\r\n\r\nSM\r\n\r\n", settings];
        for pieces in [&whole[..], &cut[..]] {
            // A frame of settings: three bytes of length, then its type.
            assert_eq!(answer_to(pieces, 4).await[3], 4);
        }
    }

    #[tokio::test]
    async fn a_connection_that_says_nothing_does_not_hold_up_the_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(serve(listener, Router::new(), stopped));
        tokio::time::sleep(PREFACE_PAUSE).await;
        stop.send(true).unwrap();
        serving.await.unwrap();
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
    }
}
