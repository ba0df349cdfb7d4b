"""The ``v41`` command. Imports are inside the commands, so that ``v41 --help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from v41lib.experiments.base import Profile


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="v41lib")
def main() -> None:
    """The V4.1 book and its library."""


@main.command()
@click.argument("chapter", required=False)
@click.option("-p", "pairs", multiple=True, metavar="NAME=VALUE", help="Change one parameter; may be repeated.")
@click.option("--profile", type=click.Choice(["ci", "full", "gpu"]), default="ci", show_default=True)
@click.option("--all", "everything", is_flag=True, help="Every chapter that is stale, two at a time.")
@click.option("--force", is_flag=True, help="Run even if the last run still holds.")
@click.option("--book", type=click.Path(path_type=Path, file_okay=False), help="The book's folder, if it is not here.")
def run(
    chapter: str | None, pairs: tuple[str, ...], profile: Profile, everything: bool, force: bool, book: Path
) -> None:
    """Run one CHAPTER (a number or a name), or all of them, and say where the result lies."""
    import signal

    from v41lib import runner
    from v41lib.notebook import NotebookError

    if everything == (chapter is not None) or (everything and pairs):
        raise click.UsageError("name one chapter, with -p if you like; or say --all, without -p")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that kernels are shut down with us
    try:
        folder = runner.find_book(book)
        if chapter is None:
            runner.run_all(folder, profile, force)
            return
        found = runner.find_chapter(folder, chapter)
        wanted = runner.Run(found, runner.make_params(found, profile, runner.parse_values(pairs)), custom=bool(pairs))
        if not force and wanted.is_fresh():
            click.echo("the last run still holds (--force runs it again)")
        else:
            wanted.execute()
        click.echo(wanted.output)
    except (runner.RunError, NotebookError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
