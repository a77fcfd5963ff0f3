"""Entry point of `python -m moiety_demo`."""

from moiety_demo.cli import app

app(prog_name="moiety demo")
