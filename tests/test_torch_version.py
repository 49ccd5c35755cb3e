"""A torch that is too old is refused at import, in one sentence; one that was never tried is warned of."""

import json

import octavo
from tests.support.processes import output_of


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


def test_a_version_that_was_never_tried_is_warned_of_once():
    script = """
        import json, warnings
        import torch
        torch.__version__ = "2.99.0"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import octavo
            import octavo
        print(json.dumps([[str(w.message), w.filename] for w in caught if "Octavo" in str(w.message)]))
    """
    ((message, where),) = json.loads(output_of(script).splitlines()[-1])
    assert message.startswith(f"Octavo {octavo.__version__} was not tried with torch 2.99.0 (tried: 2.11 to 2.15)")
    assert "Off so far: nothing." in message and "octavo doctor" in message
    assert where == "<string>"  # the line that imports octavo


def test_the_warning_names_a_path_that_is_off():
    script = """
        import warnings
        import torch
        from torch._C._dynamo import guards
        torch.__version__ = "2.99.0"
        del guards._reinterpret_tensor
        warnings.simplefilter("error")
        try:
            import octavo
        except UserWarning as warning:
            print(warning)
    """
    assert "Off so far: allocations and views of recorded calls" in output_of(script)


def test_the_versions_of_this_run_were_tried():
    from octavo.version import untried

    assert untried() == []
