"""Farms: workers that are forked from this process and share its memory.

A farm computes numbered items. Load what all items need first, and start the farm then: the workers share those
pages with this process until they write to them.

    import pjw_farm

    geometry = load_geometry()                      # once, before the fork

    def work(item):                                 # runs in a worker
        return simulate(geometry, item.number)      # bytes

    with pjw_farm.Farm(work, 1000, workers=8, in_order=True) as farm:
        for result in farm:
            if result.outcome == pjw_farm.DONE:
                output.write(result.bytes)

Each result is delivered exactly once. A worker that dies is replaced, and its unfinished items are computed again.

The module calls libpjw_spawn.so through ctypes. The calls are those of pjw_farm.h, see pjw_farm(3). The variable
PJW_SPAWN_LIBRARY names another file of the library.
"""

import ctypes
import errno
import gc
import os
import pickle
import signal
import sys
import traceback

__all__ = [
    "DONE", "EXITED", "FAILED", "KILLED", "Farm", "FarmError", "Item", "ItemError", "Progress", "Result", "map",
]

#: The item was computed.
DONE = 0
#: The function of the worker raised an exception: ``Result.bytes`` has its text.
FAILED = 1
#: Each worker that computed the item was killed, the last one by the signal ``Result.code``.
KILLED = 2
#: Each worker that computed the item exited, the last one with the status ``Result.code``.
EXITED = 3

_IN_ORDER = 1
_ONE_PU_EACH = 2
_ALLOW_THREADS = 4
# Items and workers have the limits of the library. The attempts are an int there.
_MOST = {"items": 2**43, "workers": 16384, "attempts": 2**31 - 1}
# A signal handler of Python runs between two calls of the library.
_WAIT_MS = 200


class FarmError(OSError):
    """A farm can't be started or can't go on. ``errno`` and the text are those of the library."""


class ItemError(Exception):
    """An item of :func:`map` has no result. ``result`` is its :class:`Result`."""

    def __init__(self, result):
        self.result = result
        what = {KILLED: "killed its workers by signal {}", EXITED: "ended its workers with exit status {}"}
        text = what.get(result.outcome, "failed").format(result.code)
        detail = result.bytes.decode(errors="replace") if result.outcome == FAILED else ""
        super().__init__("item {} {}\n{}".format(result.number, text, detail).rstrip())


class Item:
    """One item, as a worker gets it: ``number``, ``bytes`` (what the reader read), and the index of the ``worker``."""

    __slots__ = ("number", "bytes", "worker")

    def __init__(self, number, data, worker):
        self.number, self.bytes, self.worker = number, data, worker


class Result:
    """What became of an item: ``number``, ``outcome``, ``code``, ``attempts``, ``bytes``."""

    __slots__ = ("number", "outcome", "code", "attempts", "bytes")

    def __init__(self, fields):
        self.number, self.outcome, self.code = fields.number, fields.outcome, fields.code
        self.attempts = fields.attempts
        self.bytes = ctypes.string_at(fields.bytes, fields.size) if fields.size else b""

    def __repr__(self):
        return "Result(number={}, outcome={}, code={}, {} bytes)".format(
            self.number, self.outcome, self.code, len(self.bytes))


class Progress:
    """How far a farm is: ``total`` (None while unknown), ``delivered``, ``failed``, ``replaced``, ``workers``."""

    __slots__ = ("total", "delivered", "failed", "replaced", "workers")

    def __init__(self, fields):
        self.total = None if fields.total == 2**64 - 1 else fields.total
        self.delivered, self.failed, self.replaced = fields.delivered, fields.failed, fields.replaced
        self.workers = fields.workers


class _Item(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint64), ("bytes", ctypes.c_void_p), ("size", ctypes.c_size_t),
                ("worker", ctypes.c_uint)]


class _Result(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint64), ("outcome", ctypes.c_int), ("code", ctypes.c_int),
                ("attempts", ctypes.c_uint), ("bytes", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class _Progress(ctypes.Structure):
    _fields_ = [("total", ctypes.c_uint64), ("delivered", ctypes.c_uint64), ("failed", ctypes.c_uint64),
                ("replaced", ctypes.c_uint64), ("workers", ctypes.c_uint)]


_Work = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Item), ctypes.c_void_p)
_Read = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
_Write = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Result))
_AtWorker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint)
# The library reads errno after the call.
_Fork = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, use_errno=True)
_WriterEnd = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class _Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("workers", ctypes.c_uint), ("flags", ctypes.c_int),
                ("items", ctypes.c_uint64), ("chunk", ctypes.c_uint64), ("window", ctypes.c_uint64),
                ("ring_bytes", ctypes.c_uint64), ("input_bytes", ctypes.c_uint64), ("attempts", ctypes.c_uint),
                ("cpus", ctypes.c_char_p), ("data", ctypes.c_void_p), ("work", _Work), ("read", _Read),
                ("write", _Write), ("worker_start", _AtWorker), ("worker_end", _AtWorker), ("fork_process", _Fork),
                ("writer_end", _WriterEnd)]


_loaded = None


def _library():
    global _loaded
    if _loaded is None:
        path = os.environ.get("PJW_SPAWN_LIBRARY", "libpjw_spawn.so.0")
        try:
            library = ctypes.CDLL(path, use_errno=True)
            library.pjw_farm_start.restype = ctypes.c_void_p
        except (OSError, AttributeError) as error:
            raise FarmError(errno.ENOENT, "{}: {}: install pjw, or let PJW_SPAWN_LIBRARY name libpjw_spawn.so"
                            .format(path, error)) from error
        library.pjw_farm_start.argtypes = [ctypes.POINTER(_Options)]
        library.pjw_farm_next.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Result), ctypes.c_int]
        library.pjw_farm_get_progress.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Progress)]
        library.pjw_farm_workers.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_uint]
        library.pjw_farm_reader.argtypes = [ctypes.c_void_p]
        library.pjw_farm_writer.argtypes = [ctypes.c_void_p]
        library.pjw_farm_append.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        library.pjw_farm_end.argtypes = [ctypes.c_void_p]
        library.pjw_farm_end.restype = None
        library.pjw_farm_error.restype = ctypes.c_char_p
        _loaded = library
    return _loaded


def _failure():
    number = ctypes.get_errno()
    return FarmError(number, _library().pjw_farm_error().decode(errors="replace"))


def _pid(found):
    if found < 0:
        raise _failure()
    return found or None


def _append(to, data):
    # Not bytes(data): of a number that would be so many zeros.
    data = bytes(memoryview(data))
    if _library().pjw_farm_append(to, data, len(data)) != 0:
        raise _failure()


def _flush():
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                pass


def _fork_function(interrupts):
    # An exception must not leave the function: ctypes would return any number for the process id. A signal handler may
    # raise one at any time, so the exception is kept for the caller of the farm.
    def call(_data):
        pid = -1
        try:
            _flush()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                pid = os.fork()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except OSError as error:
            if pid < 0:
                ctypes.set_errno(error.errno or errno.EAGAIN)
            else:
                interrupts.append(error)
        except BaseException as error:
            interrupts.append(error)
            if pid < 0:
                ctypes.set_errno(errno.EAGAIN)
        return pid
    return call


def _without_exceptions(function, failure):
    # For an exception outside of the handlers of the function, such as a second KeyboardInterrupt.
    def call(*arguments):
        try:
            return function(*arguments)
        except BaseException:
            if failure is None:
                os._exit(1)
            return failure
    return call


class Farm:
    """A farm that runs: an iterator over the :class:`Result` of each item. The workers are forked at once.

    ``work(item)`` computes an :class:`Item` in a worker and returns bytes or None. ``items`` is the number of items.

    ``read(number)`` runs in the reader, a process of its own, and returns the bytes of the item with this number, or
    None after the last one. ``items`` must be left out then. ``write(result)`` runs in the writer, a process of its own,
    for each :class:`Result`. The results that the farm yields then have no bytes. A result counts as written when
    ``write`` returns: write it in the call, or write the rest in ``writer_end()``, which the writer calls after the last
    result. What is in a buffer of the program is lost if the writer dies, because a process of a farm ends by
    ``os._exit``.

    ``workers``: their number [the CPUs of this process]. ``in_order``: yield results in the order of their numbers.
    ``one_pu_each``: one CPU for each worker. ``cpus``: a list of CPU lists, as ``["0", "1", "2-3"]``, or one string,
    as ``"0;1;2-3"``; worker i has entry i modulo their number. ``chunk``: how many items a worker takes at once [1]. ``attempts``: deaths at an item after
    which it is given up [3]. ``window``, ``ring_bytes``, ``input_bytes``: as in pjw_farm.h. ``worker_start(index)`` and
    ``worker_end(index)`` are called in each worker before the first and after the last item. If ``worker_end`` or
    ``writer_end`` raises an exception, the farm raises :class:`FarmError` after the last result.
    ``allow_threads``: fork although this process has several threads; the functions must not wait for their locks.
    ``freeze``: keep the garbage collector from writing to the objects that exist now, so that they stay shared.

    Raises :class:`FarmError`; ValueError and TypeError for a wrong argument. A farm is used by one thread only.
    """

    def __init__(self, work, items=None, *, workers=None, read=None, write=None, in_order=False, one_pu_each=False,
                 cpus=None, chunk=0, attempts=0, window=0, ring_bytes=0, input_bytes=0, worker_start=None,
                 worker_end=None, writer_end=None, allow_threads=False, freeze=True):
        self._farm, self._interrupts = None, []
        if not callable(work):
            raise TypeError("work is {!r}: give a function of one item".format(work))
        functions = {"read": read, "write": write, "worker_start": worker_start, "worker_end": worker_end,
                     "writer_end": writer_end}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise TypeError("{} is {!r}: give a function, or leave it out".format(name, function))
        if (items is None) == (read is None):
            raise ValueError("give either the number of items or read")
        numbers = {"items": items or 0, "chunk": chunk, "attempts": attempts, "window": window,
                   "ring_bytes": ring_bytes, "input_bytes": input_bytes}
        for name, value in numbers.items():
            most = _MOST.get(name, 2**64 - 1)
            if not isinstance(value, int) or not 0 <= value <= most:
                raise ValueError("{} is {!r}: give a number from 0 to {}".format(name, value, most))
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if not isinstance(workers, int) or not 0 < workers <= _MOST["workers"]:
            raise ValueError("workers is {!r}: give a number from 1 to {}".format(workers, _MOST["workers"]))
        options = _Options(size=ctypes.sizeof(_Options), workers=workers, **numbers)
        options.flags = _IN_ORDER * bool(in_order) | _ONE_PU_EACH * bool(one_pu_each)
        options.flags |= _ALLOW_THREADS * bool(allow_threads)
        if cpus is not None:
            options.cpus = (cpus if isinstance(cpus, str) else ";".join(str(entry) for entry in cpus)).encode()
        options.work = _Work(_without_exceptions(_work_function(work), 1))
        if read is not None:
            options.read = _Read(_without_exceptions(_read_function(read), -1))
        if write is not None:
            options.write = _Write(_without_exceptions(_write_function(write), 1))
        if worker_start is not None:
            options.worker_start = _AtWorker(_without_exceptions(_start_function(worker_start), None))
        options.worker_end = _AtWorker(_without_exceptions(_end_function(worker_end), None))
        options.writer_end = _WriterEnd(_without_exceptions(_writer_end_function(writer_end), 1))
        options.fork_process = _Fork(_without_exceptions(_fork_function(self._interrupts), -1))
        # The library calls the functions as long as the farm exists.
        self._options = options
        self._frozen = freeze
        if freeze:
            gc.freeze()
        self._farm = _library().pjw_farm_start(ctypes.byref(options))
        error = None if self._farm else _failure()
        if self._interrupts:
            error = self._interrupts.pop(0)
        if error is not None:
            self.end()
            raise error

    def next(self, timeout=None):
        """Returns the next :class:`Result`, or None after the last one.

        Raises TimeoutError if no result comes within ``timeout`` seconds, and :class:`FarmError` if the farm can't go on.
        """
        left = None if timeout is None else max(0, int(timeout * 1000))
        result = _Result()
        while self._farm:
            if self._interrupts:
                raise self._interrupts.pop(0)
            wait = _WAIT_MS if left is None else min(left, _WAIT_MS)
            found = _library().pjw_farm_next(self._farm, ctypes.byref(result), wait)
            if found == 1:
                return Result(result)
            if found == 0:
                return None
            if ctypes.get_errno() != errno.EAGAIN:
                raise _failure()
            if left is not None:
                left -= wait
                if left <= 0:
                    raise TimeoutError("no result came within {} s".format(timeout))
        return None

    def progress(self):
        """Returns the :class:`Progress` of the farm."""
        progress = _Progress()
        if _library().pjw_farm_get_progress(self._farm, ctypes.byref(progress)) != 0:
            raise _failure()
        return Progress(progress)

    def workers(self):
        """Returns the process ids of the workers that run now."""
        count = _library().pjw_farm_workers(self._farm, None, 0)
        if count < 0:
            raise _failure()
        pids = (ctypes.c_int * count)()
        count = min(count, _library().pjw_farm_workers(self._farm, pids, count))
        return list(pids[:count])

    def reader(self):
        """Returns the process id of the reader, or None if the farm has no reader or it has ended."""
        return _pid(_library().pjw_farm_reader(self._farm))

    def writer(self):
        """Returns the process id of the writer, or None if the farm has no writer or it has ended."""
        return _pid(_library().pjw_farm_writer(self._farm))

    def end(self):
        """Kills the processes of the farm that still run, and frees its memory."""
        # A farm whose options were refused has no attribute.
        farm, self._farm = getattr(self, "_farm", None), None
        if farm:
            _library().pjw_farm_end(farm)
        if getattr(self, "_frozen", False):
            self._frozen = False
            gc.unfreeze()

    def __iter__(self):
        return self

    def __next__(self):
        result = self.next()
        if result is None:
            raise StopIteration
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.end()

    def __del__(self):
        self.end()


def map(function, sequence, **options):
    """Yields ``function(value)`` for each value of the sequence, in order, computed by the workers of a farm.

    Results are pickled. The values are not: the workers have them from the fork. Raises :class:`ItemError` for a value
    whose computation failed. The options are those of :class:`Farm`.
    """
    def work(item):
        return pickle.dumps(function(sequence[item.number]), pickle.HIGHEST_PROTOCOL)

    options["in_order"] = True
    try:
        length = len(sequence)
    except OverflowError:
        raise ValueError("the sequence is too long: a farm has at most {} items".format(_MOST["items"])) from None
    with Farm(work, length, **options) as farm:
        for result in farm:
            if result.outcome != DONE:
                raise ItemError(result)
            yield pickle.loads(result.bytes)


def _text_of_exception():
    return traceback.format_exc().encode(errors="replace")


def _work_function(work):
    def call(_data, item, result):
        try:
            fields = item.contents
            data = ctypes.string_at(fields.bytes, fields.size) if fields.size else b""
            value = work(Item(fields.number, data, fields.worker))
            if value is not None:
                _append(result, value)
            return 0
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            _append(result, _text_of_exception())
            return 1
    return call


def _guarded(call, on_error):
    """Wraps a callback of the library, which no exception may leave. ``on_error`` gives the value that tells of a failure."""
    def guarded(*arguments):
        try:
            return call(*arguments)
        except BaseException:
            traceback.print_exc()
            _flush()
            return on_error()
    return guarded


def _exit():
    os._exit(1)


def _read_function(read):
    def call(_data, number, item):
        value = read(number)
        if value is None:
            _flush()
            return 0
        _append(item, value)
        return 1
    return _guarded(call, lambda: -1)


def _write_function(write):
    def call(_data, result):
        write(Result(result.contents))
        _flush()
        return 0
    return _guarded(call, lambda: 1)


def _start_function(function):
    def call(_data, worker):
        function(worker)
    return _guarded(call, _exit)


def _end_function(function):
    def call(_data, worker):
        if function is not None:
            function(worker)
        _flush()
    return _guarded(call, _exit)


def _writer_end_function(function):
    def call(_data):
        if function is not None:
            function()
        _flush()
        return 0
    return _guarded(call, lambda: 1)
