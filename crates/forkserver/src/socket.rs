//! One end of a frame socket in the host: never blocks, queues what the peer does not take yet, hands out whole frames, and
//! carries descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::frame::{Frame, FrameError, FrameReader, READ_BYTES, encode};

/// The most descriptors one frame carries: the six wires of a life.
pub const MAX_DESCRIPTORS: usize = 6;

#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("the socket failed: {0}")]
    Io(#[from] io::Error),
}

/// Whether descriptors may arrive on this socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receives {
    FramesOnly,
    Descriptors,
}

#[derive(Debug)]
pub struct FrameSocket {
    /// Registered for reading only: a peer that reads what we sent makes us writable, and each such event would wake this
    /// thread for nothing (one more wake-up per cell).
    socket: AsyncFd<OwnedFd>,
    /// A second registration, for writing, while the peer does not take what is queued.
    writable: Option<AsyncFd<OwnedFd>>,
    reader: FrameReader,
    receives: Receives,
    received: VecDeque<OwnedFd>,
    unsent: VecDeque<Unsent>,
}

#[derive(Debug)]
struct Unsent {
    bytes: Vec<u8>,
    from: usize,
    descriptors: Vec<OwnedFd>,
}

impl FrameSocket {
    /// A connected pair: the host's end, registered with the running tokio runtime, and the peer's end, which blocks.
    pub fn pair(receives: Receives) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let ours = Self {
            socket: registered(ours, Interest::READABLE)?,
            writable: None,
            reader: FrameReader::default(),
            receives,
            received: VecDeque::new(),
            unsent: VecDeque::new(),
        };
        Ok((ours, theirs))
    }

    /// Sends a frame, or queues what the peer does not take at once. An error means that the peer is gone.
    pub fn send(&mut self, kind: u16, id: u64, payload: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let bytes = encode(kind, id, payload);
        self.unsent.push_back(Unsent {
            bytes,
            from: 0,
            descriptors,
        });
        // With a registration for writing, the queue is being emptied already.
        if self.writable.is_none() { self.flush() } else { Ok(()) }
    }

    /// How many frames wait for the peer to read.
    pub fn unsent(&self) -> usize {
        self.unsent.len()
    }

    /// The next frame; `Ok(None)` at the end of file. Loses nothing when its future is dropped. Sends what is queued meanwhile.
    pub async fn receive(&mut self) -> Result<Option<Frame>, SocketError> {
        loop {
            if let Some(frame) = self.reader.next_frame()? {
                return Ok(Some(frame));
            }
            let (socket, reader, received) = (&self.socket, &mut self.reader, &mut self.received);
            tokio::select! {
                biased;
                readable = socket.readable() => {
                    let mut readable = readable?;
                    match fill(socket.as_fd(), self.receives, reader, received) {
                        Ok(Filled::EndOfFile) => return Ok(None),
                        Ok(Filled::Some) => {}
                        Ok(Filled::All) => readable.clear_ready(),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => readable.clear_ready(),
                        Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => return Ok(None),
                        Err(error) => return Err(error.into()),
                    }
                }
                () = writable(self.writable.as_ref()) => {
                    // A peer that is gone is told by the end of file, after all that it has still sent.
                    self.flush().ok();
                }
            }
        }
    }

    /// The next frame that has already arrived, without waiting.
    pub fn receive_now(&mut self) -> Result<Option<Frame>, SocketError> {
        loop {
            if let Some(frame) = self.reader.next_frame()? {
                return Ok(Some(frame));
            }
            let filled = fill(self.socket.as_fd(), self.receives, &mut self.reader, &mut self.received);
            if !matches!(filled, Ok(Filled::Some | Filled::All)) {
                return Ok(None);
            }
        }
    }

    /// The oldest descriptor that came and has not been taken.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.received.pop_front()
    }

    fn flush(&mut self) -> io::Result<()> {
        while let Some(next) = self.unsent.front_mut() {
            match send_some(self.socket.as_fd(), &next.bytes[next.from..], &next.descriptors) {
                Ok(count) => {
                    // The descriptors went with the first byte.
                    next.descriptors.clear();
                    next.from += count;
                    if next.from == next.bytes.len() {
                        self.unsent.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.writable.is_none() {
                        self.writable = Some(registered(self.socket.get_ref().try_clone()?, Interest::WRITABLE)?);
                    }
                    return Ok(());
                }
                Err(error) => {
                    self.unsent.clear();
                    self.writable = None;
                    return Err(error);
                }
            }
        }
        self.writable = None;
        Ok(())
    }
}

fn registered(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` keeps its descriptor open and the same for as long as the registration owns it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

async fn writable(registration: Option<&AsyncFd<OwnedFd>>) {
    match registration {
        // An error shows again in the write that follows.
        Some(registration) => {
            if let Ok(mut ready) = registration.writable().await {
                ready.clear_ready();
            }
        }
        None => std::future::pending().await,
    }
}

enum Filled {
    EndOfFile,
    /// There may be more.
    Some,
    /// The socket was emptied.
    All,
}

fn fill(
    socket: BorrowedFd<'_>,
    receives: Receives,
    reader: &mut FrameReader,
    received: &mut VecDeque<OwnedFd>,
) -> io::Result<Filled> {
    match receives {
        Receives::FramesOnly => match reader.fill(socket)? {
            0 => Ok(Filled::EndOfFile),
            // A short read is the end of what is there, unless the peer has sent descriptors: it stops short at each of them.
            count if count < READ_BYTES && rustix::io::ioctl_fionread(socket) == Ok(0) => Ok(Filled::All),
            _ => Ok(Filled::Some),
        },
        // A read stops short where descriptors came with the bytes.
        Receives::Descriptors => match receive_some(socket, reader, received)? {
            0 => Ok(Filled::EndOfFile),
            _ => Ok(Filled::Some),
        },
    }
}

fn send_some(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<usize> {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // NOSIGNAL: a peer that is gone is an error here, never a SIGPIPE in the daemon.
    Ok(sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?)
}

fn receive_some(
    socket: BorrowedFd<'_>,
    reader: &mut FrameReader,
    received: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4096];
    let message = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = part {
            received.extend(descriptors);
        }
    }
    reader.push(&bytes[..message.bytes]);
    Ok(message.bytes)
}
