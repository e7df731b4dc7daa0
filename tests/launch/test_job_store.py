"""Every worker of a job finds the launcher's store by its environment alone."""

from jaxpar_launch import launch


def test_workers_meet_in_the_launchers_store(script) -> None:
    path = script("""
        from jaxpar_launch.env import WorkerEnv
        from jaxpar_launch.store import StoreClient
        env = WorkerEnv.from_environ()
        with StoreClient(env.store, token=env.store_token, timeout_s=10) as store:
            store.set(f"from {env.rank}", env.rank + 10)
            print(store.get(f"from {1 - env.rank}"))
    """)
    result = launch(path, nproc=2, timeout_s=20).check()
    assert result.output == ("11\n", "10\n")
