"""Run a command on a terminal with COLUMNS columns, as a user sees it: columns.py COLUMNS COMMAND..."""

import fcntl
import os
import pty
import struct
import sys
import termios

columns, command = int(sys.argv[1]), sys.argv[2:]
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    os.execvp(command[0], command)
text = b""
while True:
    try:
        part = os.read(terminal, 65536)
    except OSError:  # the command has ended
        break
    text += part
sys.stdout.buffer.write(text.replace(b"\r\n", b"\n"))
sys.stdout.flush()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
