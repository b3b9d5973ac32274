"""Commands of the CLI, run in this process: their exit status and output."""

from kvtrie.cli import main


def run(capsys, *arguments):
    """Exit status, standard output and error of one command."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err
