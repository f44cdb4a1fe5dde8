import json
import subprocess

from flame.metrics.env import describe_environment, git_commit, write_env


def test_env_json_says_what_the_run_ran_on(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    write_env(tmp_path / "run", world_size=8)
    text = (tmp_path / "run" / "env.json").read_text()
    env = json.loads(text)
    assert env["world_size"] == 8 and env["num_hosts"] == 2
    assert env["versions"]["torch"] and env["versions"]["flame"] and env["python"].startswith("3.")
    assert env["devices"] and env["command"] and env["variables"]["OMP_NUM_THREADS"] == "3"
    assert "secret" not in text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["env.json"]


def test_one_process_is_one_host(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert describe_environment()["num_hosts"] == 1


def test_commit_only_of_a_checkout(tmp_path):
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    commit = git_commit(tmp_path)
    assert commit is not None and len(commit) == 40
