"""A run that is ended by the command `stop`, in another process and through the store alone."""

import pytest

from tests.e2e.flow_process import COLD, Flows, require_same_run


@pytest.mark.usefixtures("with_prefect")
def test_a_run_ends_with_its_stages_when_it_is_stopped_and_its_command_finishes_it(
    flows: Flows, reference: Flows
) -> None:
    flows.forget("iterations/0002/update")
    run = flows.start(*COLD)
    # Now it imports torch, which takes longer than the command needs to be heard.
    run.wait_until(lambda: flows.phases("update", "starting"))
    assert " is stopped: process " in flows.command("stop")
    assert "; the same command continues it" in run.finish(143)
    assert flows.nothing_is_left()
    assert "the last one was stopped" in flows.command("status")
    flows.run()
    require_same_run(flows, reference)
