"""`spt` and `python -m spt`: signals are taken care of before anything else is imported."""

from spt.runtime import signals


def main() -> None:
    signals.install()
    from spt_cli import main

    main()


if __name__ == "__main__":
    main()
