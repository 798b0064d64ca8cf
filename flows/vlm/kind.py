"""Runs that fine-tune a VLM, as a kind of run."""

from cosmos_rl_core.config.vlm.recipe import checked, is_vlm
from flows.planning.kinds import Kind
from flows.vlm.about import about
from flows.vlm.plan import VlmPlan, make_plan
from flows.vlm.run import VlmRun
from flows.vlm.waves import vlm_sft

KIND = Kind(claims=is_vlm, check=checked, plan=VlmPlan, make_plan=make_plan, run=VlmRun, waves=vlm_sft, about=about)
