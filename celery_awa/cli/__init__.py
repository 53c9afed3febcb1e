"""The commands of ``python -m celery_awa``."""

from __future__ import annotations

import os

import click

from ..errors import AwaError, SettingsError
from ..settings import Settings
from ..store import embedded
from ..store.migrations import migrate
from .rescue import rescue_command

URL_VARIABLE = "AWA_DATABASE_URL"


@click.group()
def main() -> None:
    """Look after the database and the jobs of celery-awa."""


@main.command("migrate")
@click.option(
    "--database-url",
    metavar="URL",
    help=f"postgresql://… or embedded:PATH; without it {URL_VARIABLE} from the environment.",
)
@click.option(
    "--schema",
    metavar="NAME",
    default=Settings().schema,
    show_default=True,
    help="Postgres schema.",
)
def migrate_command(database_url: str | None, schema: str) -> None:
    """Create the tables, or bring them to this version; run it before the workers of a release.

    Any number may run at once. The role needs the right to create tables in the schema.
    """
    try:
        applied = migrate(_url(database_url), schema=schema)
    except AwaError as exc:
        raise click.ClickException(" ".join(str(exc).split())) from exc
    click.echo(
        f"schema {schema}: applied {', '.join(applied)}"
        if applied
        else f"schema {schema} is up to date"
    )


main.add_command(rescue_command)


def _url(option: str | None) -> str:
    url = os.environ.get(URL_VARIABLE) if option is None else option
    if url is None:
        raise SettingsError(
            f"which database? Give --database-url postgresql://…, or set {URL_VARIABLE}"
        )
    if url == embedded.PREFIX:
        raise SettingsError(
            "the server of embedded: would end with this command; name a folder: embedded:PATH"
        )
    return url
