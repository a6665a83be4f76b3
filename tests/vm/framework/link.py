"""The host's connections to a machine: commands for the agent in the guest, and commands for QEMU.

The protocol of the agent is described in image/agent.
"""
import json
import socket
import struct
import time


class Lost(Exception):
    """The guest or QEMU no longer answers."""


class Stopped(Lost):
    """The kernel of the guest has stopped and will not continue."""


def connect(path, deadline):
    """Connects to a socket that QEMU creates shortly after its start."""
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
    """A socket with complete reads and a deadline."""

    # The seconds without data after which `has_stopped` is called.
    POLL_INTERVAL = 5

    def __init__(self, path, deadline):
        self.socket = connect(path, deadline)
        self.buffer = b""
        # Returns whether the other end has stopped. Called with the seconds since the last data, while no data arrives.
        self.has_stopped = lambda silent: False
        self.last_data_at = time.monotonic()

    def receive(self, until):
        left = until - time.monotonic()
        if left <= 0:
            raise Lost("no answer in time")
        self.socket.settimeout(min(left, self.POLL_INTERVAL))
        try:
            data = self.socket.recv(1 << 16)
        except socket.timeout as error:
            if self.has_stopped(time.monotonic() - self.last_data_at):
                raise Stopped("its kernel has stopped") from error
            return
        except OSError as error:
            raise Lost(str(error)) from error
        if not data:
            raise Lost("QEMU has ended")
        self.last_data_at = time.monotonic()
        self.buffer += data

    def exactly(self, length, until):
        while len(self.buffer) < length:
            self.receive(until)
        data, self.buffer = self.buffer[:length], self.buffer[length:]
        return data

    def line(self, until):
        while b"\n" not in self.buffer:
            self.receive(until)
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line

    def send(self, data, until):
        self.socket.settimeout(max(0.01, until - time.monotonic()))
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Lost(str(error)) from error


class Agent:
    """Runs commands in the guest, one after another."""

    # The host waits this much longer than the guest's own deadline, because the clocks of guest and host differ.
    GRACE = 20

    def __init__(self, path):
        self.stream = Stream(path, 10)

    def run(self, command, deadline, stdin=b"", out=None, err=None):
        """Returns the exit code of the command, or "deadline". `out` and `err` are called with each piece of its output."""
        until = time.monotonic() + deadline + self.GRACE
        request = {"run": command, "deadline": deadline, "stdin": len(stdin)}
        self.stream.send(json.dumps(request).encode() + b"\n" + stdin, until)
        while True:
            kind, length = struct.unpack(">cI", self.stream.exactly(5, until))
            data = self.stream.exactly(length, until)
            if kind == b"x":
                return data.decode() if data == b"deadline" else int(data)
            to = out if kind == b"o" else err
            if to:
                to(data)


class Monitor:
    """The control connection of QEMU (QMP)."""

    def __init__(self, path):
        self.stream = Stream(path, 10)
        self.stream.line(time.monotonic() + 10)
        self.execute("qmp_capabilities")

    def execute(self, name, deadline=30, **arguments):
        until = time.monotonic() + deadline
        self.stream.send(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n", until)
        while True:
            answer = json.loads(self.stream.line(until))
            if "error" in answer:
                raise Lost(f"{name}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def wait_for_migration(self, deadline):
        """Waits until the state of the machine is saved or loaded."""
        until = time.monotonic() + deadline
        while time.monotonic() < until:
            status = self.execute("query-migrate").get("status")
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise Lost(f"the state was not transferred: {status}")
            time.sleep(0.05)
        raise Lost("the state was not transferred in time")
