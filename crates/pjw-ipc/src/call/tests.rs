//! The parsing of calls.

use super::*;
use serde_json::json;

fn call(method: &str, parameters: Value) -> Result<Call, CallError> {
    Call::parse(&format!("{INTERFACE_NAME}.{method}"), Some(parameters))
}

#[test]
fn an_absent_parameter_and_null_are_the_same() {
    let request = Assign { job: "a".into(), cores: Some(2), pids: Some(vec![1, 2]), ..Assign::default() };
    assert_eq!(call("Assign", serde_json::to_value(&request).unwrap()), Ok(Call::Assign(request)));
    assert_eq!(
        call("Assign", json!({"job": "a", "cores": null})),
        Ok(Call::Assign(Assign { job: "a".into(), ..Assign::default() }))
    );
}

#[test]
fn the_error_names_the_wrong_parameter() {
    let wrong = |name: &str| Err(CallError::InvalidParameter(name.to_owned()));
    assert_eq!(call("Assign", json!({})), wrong("job"));
    assert_eq!(call("Assign", json!({"job": 7})), wrong("job"));
    assert_eq!(call("Assign", json!({"job": "a", "cores": "two"})), wrong("cores"));
    assert_eq!(call("Assign", json!({"job": "a", "cores": -1})), wrong("cores"));
    assert_eq!(call("Assign", json!({"job": "a", "coers": 1})), wrong("coers"));
    assert_eq!(call("GetStatus", json!({"x": 1})), wrong("x"));
    assert_eq!(call("GetStatus", json!([])), wrong("parameters"));
    assert_eq!(call("Release", json!(["a"])), wrong("parameters"), "there is no position, only names");
    assert_eq!(call("Nonsense", json!({})), Err(CallError::MethodNotFound("org.pjw.Warden.Nonsense".into())));
    assert_eq!(Call::parse("org.other.Get", None), Err(CallError::InterfaceNotFound("org.other".into())));
    assert_eq!(Call::parse("", None), Err(CallError::InterfaceNotFound(String::new())));
}
