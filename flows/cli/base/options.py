"""Arguments and options that several commands take."""

from typing import Annotated

from typer import Argument, Option

from flows.defaults import STORE_VARIABLE

RunArgument = Annotated[str, Argument(metavar="RUN", help="Id of the run")]
RecipeArgument = Annotated[str, Argument(help="TOML: a path, package:tiny/nft, or one of cosmos-rl")]
RunIdOption = Annotated[str | None, Option(help="Name of the run; default: from the recipe")]
IterationsOption = Annotated[int | None, Option(min=1, help="Iterations; default: the recipe's number")]
OverridesOption = Annotated[
    list[str] | None, Option("--set", help="Change a setting: section.key=value; may be repeated")
]
StoreOption = Annotated[str, Option(envvar=STORE_VARIABLE, help="Directory or URL (s3://bucket/prefix) of all runs")]
ClusterOption = Annotated[str | None, Option(help="Cluster profile: a TOML file, or package:local")]
DryRunOption = Annotated[bool, Option(help="Print what would happen; change nothing")]
JsonOption = Annotated[bool, Option("--json", help="Print only JSON; notes go to stderr")]
SweepsOption = Annotated[
    list[str] | None, Option("--sweep", help="A setting with values: section.key=value,value; may be repeated")
]
NameOption = Annotated[str | None, Option(help="Name of the study; default: from its runs")]
