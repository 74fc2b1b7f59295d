from integration.daemon_host import Daemon
def test_smoke(ready_daemon: Daemon) -> None:
    print(ready_daemon.status(), ready_daemon.messages)
    print(ready_daemon.control("get_default_active_thread_percentage"))
    assert ready_daemon.stop() == 0
    print(ready_daemon.log, ready_daemon.messages)
