"""The host's ends of the lines to a machine: commands for the guest's agent, and orders for QEMU.

What goes over the agent's line is described in image/agent.
"""
import json
import socket
import struct
import time


class Lost(Exception):
    """The guest or QEMU no longer answers."""


class Stopped(Lost):
    """The kernel of the guest has stopped for good."""


def connect(path, deadline):
    """A stream to a socket that QEMU is about to make."""
    until = time.monotonic() + deadline
    while True:
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(path)
            return stream
        except OSError as error:
            stream.close()
            if time.monotonic() > until:
                raise Lost(f"{path}: {error}") from error
            time.sleep(0.02)


class Stream:
    """A socket that is read in whole pieces, until a moment and no longer."""

    # Seconds without an answer after which `has_stopped` is asked.
    PATIENCE = 5

    def __init__(self, path, deadline):
        self.socket = connect(path, deadline)
        self.ahead = b""
        # Whether the other end has stopped for good. Asked while no answer comes, with the seconds of silence.
        self.has_stopped = lambda silent: False
        self.heard_at = time.monotonic()

    def more(self, until):
        left = until - time.monotonic()
        if left <= 0:
            raise Lost("no answer in time")
        self.socket.settimeout(min(left, self.PATIENCE))
        try:
            data = self.socket.recv(1 << 16)
        except socket.timeout as error:
            if self.has_stopped(time.monotonic() - self.heard_at):
                raise Stopped("its kernel has stopped") from error
            return
        except OSError as error:
            raise Lost(str(error)) from error
        if not data:
            raise Lost("QEMU has ended")
        self.heard_at = time.monotonic()
        self.ahead += data

    def exactly(self, length, until):
        while len(self.ahead) < length:
            self.more(until)
        data, self.ahead = self.ahead[:length], self.ahead[length:]
        return data

    def line(self, until):
        while b"\n" not in self.ahead:
            self.more(until)
        line, self.ahead = self.ahead.split(b"\n", 1)
        return line

    def send(self, data, until):
        self.socket.settimeout(max(0.01, until - time.monotonic()))
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Lost(str(error)) from error


class Agent:
    """Runs commands in the guest, one after another."""

    # So much later than the guest's own deadline does the host give up: the guest's clock is not the host's.
    GRACE = 20

    def __init__(self, path):
        self.stream = Stream(path, 10)

    def run(self, words, deadline, stdin=b"", out=None, err=None):
        """The command's exit code, or "deadline". `out` and `err` are given each piece of what it writes."""
        until = time.monotonic() + deadline + self.GRACE
        order = {"run": words, "deadline": deadline, "stdin": len(stdin)}
        self.stream.send(json.dumps(order).encode() + b"\n" + stdin, until)
        while True:
            kind, length = struct.unpack(">cI", self.stream.exactly(5, until))
            data = self.stream.exactly(length, until)
            if kind == b"x":
                return data.decode() if data == b"deadline" else int(data)
            to = out if kind == b"o" else err
            if to:
                to(data)


class Monitor:
    """QEMU's own line (QMP)."""

    def __init__(self, path):
        self.stream = Stream(path, 10)
        self.stream.line(time.monotonic() + 10)
        self.order("qmp_capabilities")

    def order(self, name, deadline=30, **arguments):
        until = time.monotonic() + deadline
        self.stream.send(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n", until)
        while True:
            answer = json.loads(self.stream.line(until))
            if "error" in answer:
                raise Lost(f"{name}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def migrated(self, deadline):
        """Waits until the machine's state is out, or in."""
        until = time.monotonic() + deadline
        while time.monotonic() < until:
            status = self.order("query-migrate").get("status")
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise Lost(f"the state did not pass: {status}")
            time.sleep(0.05)
        raise Lost("the state did not pass in time")
