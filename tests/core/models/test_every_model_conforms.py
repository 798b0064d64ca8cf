"""The shipped suite on every model plugin, but for its steps of training."""

from cosmos_rl_core.conformance.models.test_against_stock import *  # noqa: F403
from cosmos_rl_core.conformance.models.test_counting import *  # noqa: F403
from cosmos_rl_core.conformance.models.test_given import *  # noqa: F403
from cosmos_rl_core.conformance.models.test_media import *  # noqa: F403
from cosmos_rl_core.conformance.models.test_negative import *  # noqa: F403
from cosmos_rl_core.conformance.models.test_sizes import *  # noqa: F403
from cosmos_rl_core.conformance.models.test_stock_call import *  # noqa: F403
