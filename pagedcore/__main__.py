"""``python -m pagedcore``: the same as the command ``pagedcore``."""

from pagedcore.cli.main import main

main()
