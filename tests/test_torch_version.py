"""A torch that is too old is refused at import, in one sentence."""

import json

from tests.processes import output_of


def test_an_old_torch_is_said_in_one_sentence_at_import():
    """Before anything else of torch is touched: here it has nothing but a version."""
    script = """
        import json, sys, types
        said = {}
        for version in ("2.10.0", "2.9.1+cpu", "2.10.1a0+git1234", "1.13.1", "2.11.0", "2.100.0a0+git1234", "3.0.0"):
            sys.modules["torch"] = types.ModuleType("torch")
            sys.modules["torch"].__version__ = version
            try:
                import octavo
            except Exception as error:
                said[version] = str(error)
            for name in [name for name in sys.modules if name.partition(".")[0] == "octavo"]:
                del sys.modules[name]
        print(json.dumps(said))
    """
    messages = json.loads(output_of(script).splitlines()[-1])
    assert len(messages) == 7
    for version, message in messages.items():
        number = version.split("+")[0]
        old = number.startswith(("2.10.", "2.9.", "1."))
        assert (number in message and "2.11" in message and "\n" not in message) == old, f"{version}: {message}"
