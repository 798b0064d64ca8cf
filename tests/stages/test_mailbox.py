"""What a flow and the agents of an allocation tell each other, where it can be read."""

from cosmos_rl_core.storage import store
from stages.execution.agent import Order, Orders, carried_out, read_orders, returncode_of


def test_words_in_a_mailbox_that_cannot_be_read_were_never_said(tmp_path):
    mailbox = str(tmp_path)
    order = Order(id="a", name="a", request="{}", execution="{}", command=("true",))
    said = {"orders.json": Orders(beat=3, orders=(order,)).model_dump_json(), "agent.0": "3", "a/returncode.0": "64"}
    for name, text in said.items():
        store.write(f"{mailbox}/{name}", text.encode())
    assert (read_orders(mailbox).orders, carried_out(mailbox, 1), returncode_of(mailbox, order)) == ((order,), 3, 64)
    for damage in (b"", b"{", b"\xff", b"[1]"):
        for name in said:
            store.write(f"{mailbox}/{name}", damage)
        assert (read_orders(mailbox), carried_out(mailbox, 1), returncode_of(mailbox, order)) == (Orders(), -1, None)
