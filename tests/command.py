"""Commands in processes of their own."""

import os
import subprocess


def run(*command, cwd=None, **environment):
    """What a command printed; its errors become the test's message."""
    environment = {**os.environ, **environment}
    command = list(map(str, command))
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
