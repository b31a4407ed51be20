"""``python -m liveset``, where the script ``liveset`` is not on the path."""

from liveset.cli import main

if __name__ == "__main__":
    main()
