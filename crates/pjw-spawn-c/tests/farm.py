"""Checks each call of the module pjw_farm. A failed check ends the program with its line."""

import errno
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import warnings

import pjw_farm


def refused(error, text, *arguments, **options):
    try:
        pjw_farm.Farm(*arguments, **options)
    except error as caught:
        assert text in str(caught), caught
        return caught
    raise AssertionError("it was not refused: " + text)


def results_come_in_order():
    common = [number * number for number in range(500)]
    with pjw_farm.Farm(lambda item: b"%d" % common[item.number], 500, workers=3, in_order=True, chunk=4) as farm:
        assert len(farm.workers()) == 3
        assert farm.reader() is None and farm.writer() is None
        results = list(farm)
        assert [result.number for result in results] == list(range(500))
        assert all(result.outcome == pjw_farm.DONE for result in results)
        assert [int(result.bytes) for result in results] == common
        progress = farm.progress()
        assert (progress.total, progress.delivered, progress.failed, progress.workers) == (500, 500, 0, 0)


def workers_that_are_killed_lose_nothing():
    # Each worker writes a byte at the place of its process id when it begins an item.
    begun = os.memfd_create("begun")

    def has_begun(pid):
        return os.pread(begun, 1, pid) == b"x"

    def work(item):
        os.pwrite(begun, b"x", os.getpid())
        time.sleep(0.0002)
        return bytes(item.number % 5000)

    with pjw_farm.Farm(work, 3000, workers=3, attempts=1000, window=64) as farm:
        numbers, killed, early = [], 0, 0
        for result in farm:
            assert result.bytes == bytes(result.number % 5000)
            numbers.append(result.number)
            # Each time another worker than the last. A new worker may get its first CPU time late, and the farm gives
            # up after ten deaths of a worker in a row without an item.
            others = [pid for pid in farm.workers() if pid != killed and (early < 8 or has_begun(pid))]
            # Not at the end: a worker that is killed in its last step is an error.
            if len(numbers) % 60 == 0 and len(numbers) < 2900 and others:
                killed = others[-1]
                early += not has_begun(killed)
                os.kill(killed, signal.SIGKILL)
        assert sorted(numbers) == list(range(3000))
        assert farm.progress().replaced > 10
    os.close(begun)


def each_outcome_is_reported():
    def work(item):
        if item.number == 2:
            raise ValueError("two is wrong")
        if item.number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if item.number == 6:
            os._exit(5)

    with pjw_farm.Farm(work, 8, workers=2, attempts=2) as farm:
        results = {result.number: result for result in farm}
    assert len(results) == 8
    assert results[2].outcome == pjw_farm.FAILED and b"two is wrong" in results[2].bytes
    assert (results[4].outcome, results[4].code, results[4].attempts) == (pjw_farm.KILLED, signal.SIGKILL, 2)
    assert (results[6].outcome, results[6].code) == (pjw_farm.EXITED, 5)
    assert results[0].outcome == pjw_farm.DONE and results[0].bytes == b""


def a_reader_and_a_writer_do_input_and_output():
    with tempfile.TemporaryFile() as output:
        def write(result):
            os.pwrite(output.fileno(), result.bytes, result.number * 4)

        with pjw_farm.Farm(lambda item: item.bytes.upper(), read=lambda number: b"a%02dz" % number if number < 99 else None,
                           write=write, workers=2) as farm:
            assert all(result.bytes == b"" for result in farm)
            assert farm.progress().total == 99
        text = os.pread(output.fileno(), 1000, 0)
        assert text == b"".join(b"A%02dZ" % number for number in range(99)), text


def the_process_ids_of_the_reader_and_the_writer_are_known_while_they_run():
    with tempfile.TemporaryFile() as output:
        def write(result):
            os.pwrite(output.fileno(), b"%d %s\n" % (os.getpid(), result.bytes), 0)

        def read(number):
            return b"%d" % os.getpid() if number == 0 else None

        with pjw_farm.Farm(lambda item: item.bytes, read=read, write=write, workers=1) as farm:
            writer, reader = farm.writer(), farm.reader()
            assert len(list(farm)) == 1
            assert farm.reader() is None and farm.writer() is None
        assert os.pread(output.fileno(), 100, 0) == b"%d %d\n" % (writer, reader), (writer, reader)
    for call in (farm.reader, farm.writer):
        try:
            call()
        except pjw_farm.FarmError as error:
            assert error.errno == errno.EINVAL, error
        else:
            raise AssertionError("a farm that has ended is no error")


def map_computes_values_and_raises_for_what_fails():
    assert list(pjw_farm.map(lambda text: (text, len(text)), ["a", "bb", ""], workers=2)) == [("a", 1), ("bb", 2), ("", 0)]
    try:
        list(pjw_farm.map(lambda number: 1 / number, [1, 0], workers=1))
    except pjw_farm.ItemError as error:
        assert error.result.number == 1 and "ZeroDivisionError" in str(error), error
    else:
        raise AssertionError("the error was not raised")


def each_worker_calls_the_functions_at_its_start_and_end():
    with tempfile.TemporaryDirectory() as directory:
        def touch(name, worker):
            open(os.path.join(directory, name + str(worker)), "w").close()

        with pjw_farm.Farm(lambda item: None, 50, workers=2, one_pu_each=True,
                           worker_start=lambda worker: touch("start", worker),
                           worker_end=lambda worker: touch("end", worker)) as farm:
            assert len(list(farm)) == 50
        assert sorted(os.listdir(directory)) == ["end0", "end1", "start0", "start1"]
    own = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    for cpus in (own, ";".join(own)):
        with pjw_farm.Farm(lambda item: ",".join(map(str, os.sched_getaffinity(0))).encode(), 20, workers=2,
                           cpus=cpus) as farm:
            assert {result.bytes.decode() for result in farm} <= set(own), cpus


def wrong_calls_are_refused():
    def work(item):
        signal.pause()

    refused(TypeError, "work is None: give a function of one item", None, 5)
    refused(TypeError, "read is 7: give a function, or leave it out", work, read=7)
    refused(TypeError, "writer_end is 'x'", work, 3, writer_end="x")
    refused(ValueError, "either", work)
    refused(ValueError, "either", work, 3, read=lambda number: None)
    refused(ValueError, "workers is 0: give a number from 1 to 16384", work, 3, workers=0)
    refused(ValueError, "workers is 16385: give a number from 1 to 16384", work, 3, workers=16385)
    refused(ValueError, "items is -1: give a number from 0 to 8796093022208", work, -1)
    refused(ValueError, "items is 1180591620717411303424: give a number from 0 to 8796093022208", work, 2**70)
    refused(ValueError, "items is 8796093022209: give a number from 0", work, 2**43 + 1)
    refused(ValueError, "chunk is 1180591620717411303424: give a number from 0 to", work, 1, chunk=2**70)
    try:
        list(pjw_farm.map(work, range(2**70)))
        raise AssertionError("a sequence of 2^70 values is no error")
    except ValueError as error:
        assert "a farm has at most 8796093022208 items" in str(error), error
    refused(ValueError, "chunk is 'x'", work, 1, chunk="x")
    refused(pjw_farm.FarmError, "chunk is 5000", work, 1, chunk=5000)
    refused(pjw_farm.FarmError, "cpus", work, 1, cpus=["x"])
    refused(pjw_farm.FarmError, "may run", work, 1, cpus=["8191"])
    error = refused(pjw_farm.FarmError, "attempts is 2000", work, 1, attempts=2000)
    assert error.errno == 22
    with pjw_farm.Farm(work, 1, workers=1) as farm:
        try:
            farm.next(timeout=0.01)
        except TimeoutError:
            pass
        else:
            raise AssertionError("there was a result")
        pid = farm.workers()[0]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        pass
    else:
        raise AssertionError("the worker still runs")
    assert farm.next() is None


def threads_are_refused_unless_they_are_allowed():
    def work(item):
        return b"%d" % len(os.listdir("/proc/self/task"))

    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        refused(pjw_farm.FarmError, "2 threads", work, 1)
        # Python 3.12 or later warns of each such fork.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pjw_farm.Farm(work, 9, workers=2, allow_threads=True) as farm:
                assert [result.bytes for result in farm] == [b"1"] * 9
    finally:
        ended.set()
        thread.join()


def items_and_results_may_be_larger_than_the_shared_memory_for_results():
    texts = [bytes([number]) * 60000 for number in range(20)]
    options = {"workers": 2, "in_order": True, "ring_bytes": 4096}
    with pjw_farm.Farm(lambda item: texts[item.number], 20, **options) as farm:
        assert [result.bytes for result in farm] == texts

    def read(number):
        return texts[number] if number < 20 else None

    with pjw_farm.Farm(lambda item: item.bytes, read=read, input_bytes=65536, **options) as farm:
        assert [result.bytes for result in farm] == texts
    try:
        list(pjw_farm.Farm(lambda item: item.bytes, read=read, input_bytes=4096, **options))
    except pjw_farm.FarmError as error:
        assert error.errno == errno.EMSGSIZE and "raise input_bytes" in str(error), error
    else:
        raise AssertionError("an item is larger than the shared memory for items")
    refused(pjw_farm.FarmError, "ring_bytes is 1", lambda item: None, 1, ring_bytes=1)
    refused(pjw_farm.FarmError, "input_bytes is 1", lambda item: None, read=read, input_bytes=1)


def objects_are_frozen_during_the_farm_unless_that_is_switched_off():
    made_before = [[]]

    # gc.get_objects() leaves frozen objects out.
    def is_collected(_item=None):
        return b"yes" if any(found is made_before for found in gc.get_objects()) else b"no"

    for options, expected in [({}, b"no"), ({"freeze": True}, b"no"), ({"freeze": False}, b"yes")]:
        with pjw_farm.Farm(is_collected, 1, workers=1, **options) as farm:
            assert [result.bytes for result in farm] == [expected], options
        assert is_collected() == b"yes", options


def late_forked_workers_share_three_quarters_of_their_pages():
    # 80 % of the data are common. The workers only read them.
    common = b"c" * (40 << 20)
    (loaded, has_loaded), (may_end, let_end) = os.pipe(), os.pipe()

    def work(item):
        total = sum(common[::4096])
        own = b"o" * (10 << 20)
        os.write(has_loaded, b"x")
        os.read(may_end, 1)
        return b"%d" % (total + len(own))

    with pjw_farm.Farm(work, 2, workers=2) as farm:
        for _ in range(2):
            os.read(loaded, 1)
        for pid in farm.workers():
            with open("/proc/{}/smaps_rollup".format(pid)) as smaps:
                sizes = {line.split()[0]: int(line.split()[1]) for line in smaps.readlines()[1:]}
            permille = (sizes["Shared_Clean:"] + sizes["Shared_Dirty:"]) * 1000 // sizes["Rss:"]
            assert 750 <= permille <= 1000, sizes
        os.write(let_end, b"xx")
        assert len(list(farm)) == 2
    for descriptor in (loaded, has_loaded, may_end, let_end):
        os.close(descriptor)


def a_result_that_is_not_bytes_fails():
    with pjw_farm.Farm(lambda item: [5, "x", bytearray(b"y"), memoryview(b"z")][item.number], 4, workers=1,
                       in_order=True) as farm:
        number, text, array, view = farm
    assert number.outcome == pjw_farm.FAILED and b"TypeError" in number.bytes, number
    assert text.outcome == pjw_farm.FAILED and b"TypeError" in text.bytes, text
    assert (array.bytes, view.bytes) == (b"y", b"z")


def an_exception_at_the_end_of_a_process_is_an_error_after_the_last_result():
    def fail(*_arguments):
        raise ValueError("this text is expected")

    for options, text in [
        ({"worker_end": fail}, "worker 0 ended with exit status 1"),
        ({"write": lambda result: None, "writer_end": fail}, "the writer ended with exit status 1"),
    ]:
        with pjw_farm.Farm(lambda item: None, 3, workers=1, **options) as farm:
            assert len([farm.next() for _ in range(3)]) == 3
            try:
                farm.next()
            except pjw_farm.FarmError as error:
                assert text in str(error), error
            else:
                raise AssertionError("the farm reported success")


def a_writer_writes_at_its_end_what_it_held_back():
    with tempfile.TemporaryDirectory() as directory:
        output = open(os.path.join(directory, "output"), "wb")
        with pjw_farm.Farm(lambda item: b"%d" % item.number, 9, workers=2, in_order=True,
                           write=lambda result: output.write(result.bytes), writer_end=output.flush) as farm:
            assert len(list(farm)) == 9
        output.close()
        with open(output.name, "rb") as written:
            assert written.read() == b"012345678"


def an_interrupt_during_the_fork_reaches_the_caller_and_leaves_no_process():
    forks = []

    def interrupted():
        # As Ctrl-C: the signal is blocked during the fork, and its handler runs right after it.
        pid = fork()
        if pid > 0:
            forks.append(pid)
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    # It is ignored in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork, os.fork = os.fork, interrupted
    try:
        pjw_farm.Farm(lambda item: time.sleep(60), 1, workers=1)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the interrupt was lost")
    finally:
        os.fork = fork
    try:
        os.kill(forks[0], 0)
    except ProcessLookupError:
        pass
    else:
        raise AssertionError("the worker still runs")


def a_fork_that_fails_reports_its_error():
    def failing():
        raise OSError(errno.ENOMEM, "no memory")

    fork, os.fork = os.fork, failing
    try:
        error = refused(pjw_farm.FarmError, "no process can be forked", lambda item: None, 1, workers=1)
    finally:
        os.fork = fork
    assert error.errno == errno.ENOMEM, error


def an_exception_that_leaves_the_handler_of_a_work_function_fails_the_item():
    def failing():
        raise MemoryError("no room for the text")

    def work(item):
        raise ValueError("this text is lost")

    # The result of a callback that ctypes leaves by an exception is undefined.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: os._exit(9)
    text, pjw_farm._text_of_exception = pjw_farm._text_of_exception, failing
    try:
        with pjw_farm.Farm(work, 2, workers=1) as farm:
            assert [(result.outcome, result.bytes) for result in farm] == [(pjw_farm.FAILED, b"")] * 2
    finally:
        pjw_farm._text_of_exception, sys.unraisablehook = text, hook


def a_reader_that_fails_ends_the_farm():
    def read(number):
        if number == 3:
            raise OSError("no input")
        return b"x"

    null = os.open("/dev/null", os.O_WRONLY)
    errors = os.dup(2)
    os.dup2(null, 2)
    try:
        list(pjw_farm.Farm(lambda item: None, read=read, workers=2))
    except pjw_farm.FarmError as error:
        assert "the reader failed at item 3" in str(error), error
    else:
        raise AssertionError("the farm went on")
    finally:
        os.dup2(errors, 2)


if __name__ == "__main__":
    results_come_in_order()
    workers_that_are_killed_lose_nothing()
    each_outcome_is_reported()
    a_reader_and_a_writer_do_input_and_output()
    the_process_ids_of_the_reader_and_the_writer_are_known_while_they_run()
    map_computes_values_and_raises_for_what_fails()
    each_worker_calls_the_functions_at_its_start_and_end()
    wrong_calls_are_refused()
    threads_are_refused_unless_they_are_allowed()
    items_and_results_may_be_larger_than_the_shared_memory_for_results()
    objects_are_frozen_during_the_farm_unless_that_is_switched_off()
    late_forked_workers_share_three_quarters_of_their_pages()
    a_result_that_is_not_bytes_fails()
    an_exception_at_the_end_of_a_process_is_an_error_after_the_last_result()
    a_writer_writes_at_its_end_what_it_held_back()
    an_interrupt_during_the_fork_reaches_the_caller_and_leaves_no_process()
    a_fork_that_fails_reports_its_error()
    an_exception_that_leaves_the_handler_of_a_work_function_fails_the_item()
    a_reader_that_fails_ends_the_farm()
