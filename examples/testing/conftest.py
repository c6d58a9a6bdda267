pytest_plugins = ["interlock.testing.plugin"]
