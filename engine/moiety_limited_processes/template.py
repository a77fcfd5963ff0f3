"""Template process, from which processes with limits are forked on request; it has one thread, so forking is safe."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
from typing import TYPE_CHECKING, NoReturn

from moiety_limited_processes.frames import ChildExit, receive_frame_with_fds, send_frame

if TYPE_CHECKING:
    from collections.abc import Callable


class Template:
    """State of the template: its link to its owner, and the links on which it reports the ends of its children.

    The owner is the process that started the template: a core, an engine server or a gateway.
    """

    def __init__(self, control: socket.socket, run_child: Callable[[socket.socket], NoReturn]) -> None:
        """Create the template. `run_child` runs a forked child, with its link."""
        self._control, self._run_child = control, run_child
        self._status_links: dict[int, socket.socket] = {}  # by process id
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    def serve(self) -> None:
        """Fork and report until the owner closes the link."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._fork():
                        self._end_children()
                        return
                elif key.fileobj is self._wake_out:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_out.recv(4096)
                elif key.data in self._status_links:
                    self._end_child(key.data)
            self._report_ends()

    def _fork(self) -> bool:
        """Handle one fork request. Returns False where the owner is gone."""
        try:
            _, fds = receive_frame_with_fds(self._control, type(None))
        except (EOFError, OSError):
            return False
        link, status_link = (socket.socket(fileno=fd) for fd in fds)
        pid = os.fork()
        if pid == 0:
            self._forget_parent()
            status_link.close()
            self._run_child(link)
        link.close()
        self._status_links[pid] = status_link
        self._selector.register(status_link, selectors.EVENT_READ, data=pid)
        return True

    def _forget_parent(self) -> None:
        """Close the template's descriptors in a child, so that each link closes with the process that uses it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._control, self._wake_in, self._wake_out, *self._status_links.values()):
            one.close()

    def _end_child(self, pid: int) -> None:
        """Kill a child at the owner's request, or when the owner no longer waits for it.

        The child is not reaped yet, so the process id is still its own.
        """
        self._selector.unregister(self._status_links[pid])
        os.kill(pid, signal.SIGKILL)

    def _end_children(self) -> None:
        for pid in self._status_links:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _report_ends(self) -> None:
        while self._status_links:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            link = self._status_links.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(link)
            with contextlib.suppress(OSError):  # the owner no longer waits for it
                send_frame(link, ChildExit(status, usage.ru_utime + usage.ru_stime))
            link.close()


def serve_template(control: socket.socket, ready: object, run_child: Callable[[socket.socket], NoReturn]) -> None:
    """Send the owner that the template is `ready`, and fork children until the owner closes the link.

    What the template has loaded is not collected any more, so that its children share these pages with it.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    send_frame(control, ready)
    Template(control, run_child).serve()
