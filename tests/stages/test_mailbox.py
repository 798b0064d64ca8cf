"""What a flow and the agents of an allocation tell each other, where it can be read."""

from cosmos_rl_core.storage import store
from stages.execution.mailbox import Mailbox, Order, Orders


def test_words_in_a_mailbox_that_cannot_be_read_were_never_said(tmp_path):
    mailbox = Mailbox(str(tmp_path))
    order = Order(id="a", name="a", request="{}", execution="{}", command=("true",))
    said = {"orders.json": Orders(beat=3, orders=(order,)).model_dump_json(), "agent.0": "3", "a/returncode.0": "64"}
    for name, text in said.items():
        store.write(mailbox.path(name), text.encode())
    assert (mailbox.orders().orders, mailbox.carried_out(1), mailbox.returncode(order)) == ((order,), 3, 64)
    for damage in (b"", b"{", b"\xff", b"[1]"):
        for name in said:
            store.write(mailbox.path(name), damage)
        assert (mailbox.orders(), mailbox.carried_out(1), mailbox.returncode(order)) == (Orders(), -1, None)
