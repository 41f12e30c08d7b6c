"""`spt` and `python -m spt`: signals are taken care of before anything else is imported."""

import signal

STOPS = {signal.SIGINT, signal.SIGTERM}
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # they wait until they can be answered

from spt.runtime import signals  # noqa: E402


def main() -> None:
    signals.install()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    from spt_cli import main

    main()


if __name__ == "__main__":
    main()
