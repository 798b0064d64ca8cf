"""Names of rewards: their plugins' names, and others under which reward services offer them."""

from cosmos_rl_core import plugins


def plugin_of(name: str) -> str:
    """Return the name of the reward plugin with this name, or of the plugin that services also offer under it.

    Raises :class:`ConfigError` for an unknown name, and lists the known ones.
    """
    known = plugins.known("rewards")
    if name not in known:
        for other in known:
            if name in plugins.load("rewards", other).Options.facts.also:
                return other
    plugins.load("rewards", name)
    return name
