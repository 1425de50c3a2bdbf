"""The options of single model families, such as `--no-talker`, as the families declare them. Imports no torch."""

import argparse

from tilerank.loader.card import ModelCard
from tilerank.runtime.media.family import FamilyOptions
from tilerank.runtime.media.registry import all_options, with_options


def add_arguments(parser: argparse._ActionsContainer) -> None:
    for option in all_options():
        if option.choices:
            parser.add_argument(option.name, choices=option.choices, help=option.help)
        else:
            parser.add_argument(option.name, action="store_const", const="on", help=option.help)


def given(args: argparse.Namespace) -> FamilyOptions:
    """Return the family options of a command line that are given."""
    values = {option.name: getattr(args, option.name.strip("-").replace("-", "_")) for option in all_options()}
    return {name: value for name, value in values.items() if value is not None}


def check(args: argparse.Namespace, card: ModelCard) -> None:
    """Raise ConfigError for an option that the family of the model does not have."""
    with_options(card, given(args))
