"""The tool that runs all checks of a config's data."""

import pytest

from support.tools import ROOT, load_tool

CONFIG = str(ROOT / 'configs/kanet/kanet-kv_digits.py')


def test_table(capsys):
    load_tool('misc/check_data').main([CONFIG])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.endswith(' ok') for line in lines)


def test_a_fault_is_counted_and_ends_the_tool(capsys):
    with pytest.raises(SystemExit) as stop:
        load_tool('misc/check_data').main([CONFIG, '--cfg-options', 'model.head.num_classes=7'])
    assert str(stop.value.code).startswith('error: ')
    out = capsys.readouterr().out
    assert 'model.head.num_classes' in out
    assert any('wrong or suspicious' in line for line in out.splitlines())


def test_missing_data(tmp_path):
    with pytest.raises(SystemExit, match='data_root'):
        load_tool('misc/check_data').main([CONFIG.replace('kanet-kv_digits', 'kanet_kv_imagenet')])
