"""The one base of every error that is a sentence to the user rather than a fault of the program."""


class WorkbenchError(ValueError):
    """Something the user gave cannot be used. The message is one sentence: expected, got, what to do.

    The command line prints it and exits with 2, the dashboard shows it on the page; anything else is a bug.
    """
