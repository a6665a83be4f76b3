"""An interactive terminal on the Debian machine, over the guest's console hvc0. It ends with its shell."""
import os
import select
import shutil
import sys
import termios
import threading
import tty

from link import connect

A_DAY = 86400
# A shell with a session of its own and the console as its terminal.
START = (
    "exec setsid --ctty --wait bash -c 'stty sane rows {rows} cols {columns}; cd /pjw; "
    "export TERM=\"{term}\"; exec bash --rcfile /cases/functions -i' <>/dev/hvc0 >&0 2>&1"
)


def run_terminal(machine):
    """Runs a shell. Returns its exit code."""
    console = connect(machine.socket("shell"), 10)
    size = shutil.get_terminal_size()
    start = START.format(rows=size.lines, columns=size.columns, term=os.environ.get("TERM", "dumb"))
    ended = []
    agent = threading.Thread(
        target=lambda: ended.append(machine.agent.run(["bash", "-c", start], A_DAY)), daemon=True
    )
    is_terminal = sys.stdin.isatty()
    print("vm: a fresh machine; the files of pjw are in /pjw, `install_pjw` installs them; `exit` ends it", file=sys.stderr)
    before = termios.tcgetattr(0) if is_terminal else None
    if is_terminal:
        tty.setraw(0)
    try:
        agent.start()
        pump(console, agent)
    finally:
        if is_terminal:
            termios.tcsetattr(0, termios.TCSADRAIN, before)
    return ended[0] if ended and isinstance(ended[0], int) else 1


def pump(console, agent):
    sources = [0, console]
    quiet = False
    while agent.is_alive() or not quiet:
        ready, _, _ = select.select(sources, [], [], 0.2)
        quiet = not ready
        if 0 in ready:
            typed = os.read(0, 4096)
            if typed:
                console.sendall(typed)
            else:
                sources.remove(0)
        if console in ready:
            shown = console.recv(1 << 14)
            if not shown:
                return
            os.write(1, shown)
