"""python docs/record_terminal.py FILE.svg 'COMMAND' ['COMMAND' …]

Runs commands in a terminal of 80 columns and draws what a reader would see as an SVG that needs nothing from elsewhere:
text in the reader's own monospaced font. Standard error is shown too, as in a terminal.

docs/figures/terminal.svg:
    python docs/record_terminal.py docs/figures/terminal.svg 'spt compare quickstart quickstart-dlr'
"""

import io
import os
import pty
import struct
import sys
from fcntl import ioctl
from pathlib import Path
from subprocess import Popen
from termios import TIOCSWINSZ

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS, ROWS = 80, 40
THEME = TerminalTheme(  # dark
    (13, 17, 23),
    (230, 237, 243),
    [
        *((72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)),
        *((121, 192, 255), (210, 168, 255), (86, 212, 221), (177, 186, 196)),
    ],
    [
        *((139, 148, 158), (255, 161, 152), (126, 231, 135), (242, 204, 96)),
        *((165, 214, 255), (226, 197, 255), (179, 240, 255), (240, 246, 252)),
    ],
)
FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>A session in a terminal</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>
<g fill="#484f58"><circle cx="20" cy="20" r="6"/><circle cx="40" cy="20" r="6"/><circle cx="60" cy="20" r="6"/></g>
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run(command: str) -> str:
    """Everything the command writes to a terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with Popen(command, shell=True, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    text = b"".join(parts).decode().replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n")).rstrip()


def main(path: Path, *commands: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in commands:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(run(command)))
    path.write_text(console.export_svg(theme=THEME, code_format=FORMAT, unique_id="terminal"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
