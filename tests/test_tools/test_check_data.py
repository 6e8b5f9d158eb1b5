"""The tool that runs all checks of a config's data."""

import pytest

from support.tools import ROOT, load_tool


def run(capsys, config, *options):
    """Return the error, the output and the rows of the table, (check, dataset) -> result."""
    error = None
    try:
        load_tool('misc/check_data').main([str(ROOT / 'configs' / config), *options])
    except SystemExit as stop:
        error = stop.code
    out = capsys.readouterr().out
    head, *rows = out.partition('\n\n')[0].splitlines()
    assert head.split() == ['check', 'dataset', 'result']
    return error, out, {(row[:18].strip(), row[18:60].strip()): row[60:] for row in rows}


def test_table(capsys):
    error, _, table = run(capsys, 'kanet/kanet-kv_digits.py')
    assert error is None
    assert set(table.values()) == {'ok'}
    assert ('schedule', 'config') in table
    assert {dataset.partition('_')[0] for name, dataset in table if name == 'num_classes'} == {'train', 'val', 'test'}


def test_a_fault_is_counted_and_ends_the_tool(capsys):
    error, out, table = run(capsys, 'kanet/kanet-kv_digits.py', '--cfg-options', 'model.head.num_classes=7')
    assert error.startswith('error: ')
    assert 'model.head.num_classes' in out
    assert {name for (name, _), result in table.items() if result == '1 wrong'} == {'num_classes'}


@pytest.mark.parametrize('config', ['kanet/kanet_kv_imagenet.py', 'kao/kao-kv_r50-d8_4xb4-80k_ade20k-512x512.py'])
def test_missing_data_does_not_end_the_table(capsys, monkeypatch, tmp_path, config):
    monkeypatch.chdir(tmp_path)
    error, out, table = run(capsys, config)
    assert error.startswith('error: ')
    assert f'  {tmp_path}/data/' in out
    results = {name: result for (name, _), result in table.items()}
    assert results['files'].endswith('wrong')
    assert results['num_classes'] == 'ok'
    assert 'not read' in results.values()
