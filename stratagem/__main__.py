"""``python -m stratagem``: the command ``stratagem``, where that is not on the PATH."""

from stratagem.cli.__main__ import main

if __name__ == "__main__":
    main()
