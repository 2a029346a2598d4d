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
use tokio::net::UnixStream;

use crate::frame::{Frame, FrameError, FrameReader, encode};

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
    stream: UnixStream,
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
        let stream = UnixStream::from_std(ours.into())?;
        let (reader, received, unsent) = (FrameReader::default(), VecDeque::new(), VecDeque::new());
        Ok((
            Self {
                stream,
                reader,
                receives,
                received,
                unsent,
            },
            theirs,
        ))
    }

    /// Sends a frame, or queues what the peer does not take at once. An error means that the peer is gone.
    pub fn send(&mut self, kind: u16, id: u64, payload: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<()> {
        self.unsent.push_back(Unsent {
            bytes: encode(kind, id, payload),
            from: 0,
            descriptors,
        });
        self.flush()
    }

    /// The next frame; `Ok(None)` at the end of file. Loses nothing when its future is dropped. Sends what is queued meanwhile.
    pub async fn receive(&mut self) -> Result<Option<Frame>, SocketError> {
        loop {
            if let Some(frame) = self.reader.next_frame()? {
                return Ok(Some(frame));
            }
            let interest = if self.unsent.is_empty() {
                Interest::READABLE
            } else {
                Interest::READABLE | Interest::WRITABLE
            };
            let ready = self.stream.ready(interest).await?;
            if ready.is_writable() && !self.unsent.is_empty() {
                // A peer that is gone is told by the end of file, after all that it has still sent.
                self.flush().ok();
            }
            if ready.is_readable() || ready.is_read_closed() {
                match self.fill() {
                    Ok(0) => return Ok(None),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => return Ok(None),
                    Err(error) => return Err(error.into()),
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
            if !matches!(self.fill_now(), Ok(1..)) {
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
            let bytes = &next.bytes[next.from..];
            let stream = &self.stream;
            let sent = stream.try_io(Interest::WRITABLE, || {
                send_some(stream.as_fd(), bytes, &next.descriptors)
            });
            match sent {
                Ok(count) => {
                    // The descriptors went with the first byte.
                    next.descriptors.clear();
                    next.from += count;
                    if next.from == next.bytes.len() {
                        self.unsent.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => {
                    self.unsent.clear();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn fill(&mut self) -> io::Result<usize> {
        let stream = &self.stream;
        let (reader, received, receives) = (&mut self.reader, &mut self.received, self.receives);
        stream.try_io(Interest::READABLE, || match receives {
            Receives::FramesOnly => reader.fill(stream),
            Receives::Descriptors => receive_some(stream.as_fd(), reader, received),
        })
    }

    /// Reads whatever tokio believes of the readiness: at the end of a life there is no more time for a notification.
    fn fill_now(&mut self) -> io::Result<usize> {
        match self.receives {
            Receives::FramesOnly => self.reader.fill(&self.stream),
            Receives::Descriptors => receive_some(self.stream.as_fd(), &mut self.reader, &mut self.received),
        }
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
