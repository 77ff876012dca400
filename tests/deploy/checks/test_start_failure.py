"""One line out of what Serve says when ranks do not come up; texts as Ray 2.60 wrote them."""

from deploy.checks.start_failure import start_failure

SERVE = """Failed to update the deployments ['Scheduler'].
The deployment failed to start 3 times in a row. This may be due to a problem with its constructor \
or initial health check failing. See controller logs for details. Error:
\x1b[36mray::ServeReplica:topwork:Scheduler.initialize_and_get_metadata()\x1b[39m (pid=15019, \
ip=192.0.2.2, actor_id=a02f, repr=<ray.serve._private.replica.ServeReplica object at 0x7f58>)
  File "/lib/python3.11/concurrent/futures/_base.py", line 456, in result
    return self.__get_result()
           ^^^^^^^^^^^^^^^^^^^
  File "/ray/serve/_private/replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/topwork/deploy/serving/scheduler_deployment.py", line 79, in _start
    await self._engine.wait_until_up()
"""
APART = """\
cluster.errors.Unavailable: the ranks are down and will be back: the ranks did not start: \
\x1b[36mray::WorkerActor.load()\x1b[39m (pid=15221, ip=192.0.2.2, actor_id=c2c8, repr=<object>)
  File "/topwork/worker/distributed/parallel.py", line 38, in join_group
    raise GroupBroken(f"rank {rank} could not join {address}: {error}")
worker.errors.GroupBroken: rank 1 could not join tcp://192.0.2.2:38709: connection refused
"""
DEAD = """\
cluster.errors.Unavailable: the ranks are down and will be back: the ranks did not start: The \
actor died unexpectedly before finishing this task.
\tclass_name: WorkerActor
\tactor_id: ad43466315fce7e65f94a4c301000000
\tpid: 17698
\tnamespace: topwork
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage.
"""
NODE = """\
deploy.config_errors.ConfigError: model: /models/base holds no config.json (on node 192.0.2.3)
"""


def test_ranks_that_cannot_meet_are_told_with_the_address() -> None:
    assert start_failure([SERVE + APART]) == (
        "rank 1 could not join tcp://192.0.2.2:38709: connection refused"
    )


def test_a_process_that_died_is_told_with_its_number() -> None:
    assert start_failure([SERVE + DEAD]) == (
        "the process of a rank (pid 17698, on 192.0.2.2) has died; if memory was short, the "
        "kernel's log says so"
    )


def test_what_another_node_lacks_is_told_with_the_node() -> None:
    said = start_failure(["Deploying failed", SERVE + NODE])
    assert said == "model: /models/base holds no config.json (on node 192.0.2.3)"


def test_what_holds_no_exception_is_told_as_it_is() -> None:
    assert start_failure(["no room\nfor a bundle"]) == "no room for a bundle"
    assert start_failure([]) == "Serve does not say why"
