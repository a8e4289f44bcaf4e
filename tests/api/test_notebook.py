"""A run in the kernel of a notebook: in processes of its own, and ended by the kernel's interrupt."""

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from tests.launching.test_local import RECIPE, are_gone
from tests.tiny import save_chats, save_tiny_model
from tests.waiting import LIMIT_SECONDS
from tunekit.process.processes import SUPERVISOR
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.run import list_runs


def reply(client, request):
    """What the kernel answers to a request."""
    while True:
        message = client.get_shell_msg(timeout=LIMIT_SECONDS)
        if message["parent_header"].get("msg_id") == request:
            return message["content"]


@pytest.mark.slow
def test_an_interrupt_of_the_kernel_ends_the_run_and_leaves_no_process(tmp_path):
    save_tiny_model(tmp_path / "model")
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    (tmp_path / "double.yaml").write_text(RECIPE, encoding="utf-8")
    manager, client = start_new_kernel(startup_timeout=LIMIT_SECONDS, cwd=str(tmp_path))
    try:
        code = "import tunekit\n"
        code += "def show(event):\n    if event['event'] == 'log': print('step', event['step'], flush=True)\n"
        training = client.execute(code + "tunekit.train('double.yaml', ['train.max_steps=100000'], on_event=show)")
        shown = ""
        while "step 1\n" not in shown:
            message = client.get_iopub_msg(timeout=LIMIT_SECONDS)
            assert message["msg_type"] != "error", message["content"]
            shown += message["content"].get("text", "")
        kernel = psutil.Process(manager.provisioner.process.pid)
        workers = [child for child in kernel.children() if SUPERVISOR in child.environ()]
        assert len(workers) == 1
        manager.interrupt_kernel()
        assert reply(client, training)["ename"] == "Stopped"
        assert are_gone(workers)
        (run,) = list_runs(tmp_path / "runs")
        assert run.state == "interrupted" and newest_complete(run.path).step == run.status()["step"] > 0
        # The kernel goes on.
        assert reply(client, client.execute("1 + 1"))["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
