//! The interface description has the parameters, replies and errors of the server. The parser of zlink reads it.

use pjw_ipc::call::{Call, CallError};
use pjw_ipc::server::ServerLimits;
use pjw_ipc::{INTERFACE_DEFINITION, INTERFACE_NAME};
use serde_json::{Map, Value, json};
use zlink::idl::{CustomType, Interface, Method, Type};

use super::fixture::TestServer;

pub(crate) fn parsed_interface() -> Interface<'static> {
    Interface::try_from(INTERFACE_DEFINITION).expect("the interface description is valid Varlink")
}

/// A value of a type. A text may be used as the id of a job.
pub(crate) fn sample(kind: &Type<'_>) -> Value {
    match kind {
        Type::Bool => json!(false),
        Type::Int => json!(2),
        Type::String => json!("manual:a"),
        Type::Optional(inner) => sample(inner),
        Type::Array(inner) => json!([sample(inner)]),
        other => panic!("no parameter is of the type {other}"),
    }
}

pub(crate) fn all_parameters(method: &Method<'_>) -> Map<String, Value> {
    method.inputs().map(|input| (input.name().as_str().to_owned(), sample(input.ty()))).collect()
}

fn parse(method: &Method<'_>, parameters: Map<String, Value>) -> Result<Call, CallError> {
    Call::parse(&format!("{INTERFACE_NAME}.{}", method.name().as_str()), Some(Value::Object(parameters)))
}

fn fields_of<'a>(interface: &'a Interface<'_>, name: &str) -> Vec<(&'a str, &'a Type<'a>)> {
    let found = interface.custom_types().find(|custom| custom.name().as_str() == name);
    match found {
        Some(CustomType::Object(object)) => {
            object.fields().map(|field| (field.name().as_str(), field.ty())).collect()
        }
        other => panic!("{name} is not described as an object: {other:?}"),
    }
}

/// Fails if a value is not of its type, or if a field is missing or unknown.
fn assert_type(interface: &Interface<'_>, kind: &Type<'_>, value: &Value, place: &str) {
    match kind {
        Type::Bool => assert!(value.is_boolean(), "{place}: {value}"),
        Type::Int => assert!(value.is_i64() || value.is_u64(), "{place}: {value}"),
        Type::Float => assert!(value.is_f64(), "{place}: {value}"),
        Type::String => assert!(value.is_string(), "{place}: {value}"),
        Type::Optional(_) if value.is_null() => {}
        Type::Optional(inner) => assert_type(interface, inner, value, place),
        Type::Array(inner) => {
            for item in value.as_array().unwrap_or_else(|| panic!("{place} is no list: {value}")) {
                assert_type(interface, inner, item, place);
            }
        }
        Type::Map(inner) => {
            for item in value.as_object().unwrap_or_else(|| panic!("{place} is no object: {value}")).values()
            {
                assert_type(interface, inner, item, place);
            }
        }
        Type::Custom(name) => assert_fields(interface, &fields_of(interface, name.as_str()), value, place),
        other => panic!("{place}: unexpected type {other}"),
    }
}

fn assert_fields(interface: &Interface<'_>, fields: &[(&str, &Type<'_>)], value: &Value, place: &str) {
    let object = value.as_object().unwrap_or_else(|| panic!("{place} is no object: {value}"));
    for key in object.keys() {
        assert!(fields.iter().any(|(name, _)| name == key), "{place}.{key} is not described");
    }
    for (name, kind) in fields {
        let value = object.get(*name).unwrap_or_else(|| panic!("{place}.{name} is described and missing"));
        assert_type(interface, kind, value, &format!("{place}.{name}"));
    }
}

/// The names of the methods, in the order of the interface.
const METHODS: [&str; 18] = [
    "GetStatus",
    "ListJobs",
    "GetJob",
    "GetMemory",
    "Assign",
    "Release",
    "Want",
    "Provision",
    "ReleaseAll",
    "ExplainJob",
    "ExplainPid",
    "Plan",
    "PlanDefrag",
    "Defrag",
    "Events",
    "GetReports",
    "GetTopology",
    "Reload",
];

#[test]
fn the_interface_description_has_exactly_the_methods_of_the_server() {
    let interface = parsed_interface();
    assert_eq!(interface.name().as_str(), INTERFACE_NAME);
    let names: Vec<&str> = interface.methods().map(|method| method.name().as_str()).collect();
    assert_eq!(names, METHODS);
}

#[test]
fn the_server_accepts_the_described_parameters_and_refuses_wrong_missing_and_unknown_ones() {
    let wrong = |name: &str| Err(CallError::InvalidParameter(name.to_owned()));
    for method in parsed_interface().methods() {
        let all = all_parameters(method);
        let place = method.name().as_str();
        assert!(parse(method, all.clone()).is_ok(), "{place} with {all:?}");
        for input in method.inputs() {
            let name = input.name().as_str();
            let with = |value| {
                let mut parameters = all.clone();
                parameters.insert(name.to_owned(), value);
                parse(method, parameters)
            };
            let mut without = all.clone();
            without.remove(name);
            let (absent, null) = (parse(method, without), with(Value::Null));
            if matches!(input.ty(), Type::Optional(_)) {
                assert!(absent.is_ok() && absent == null, "{place}: without {name}");
            } else {
                assert_eq!((absent, null), (wrong(name), wrong(name)), "{place}: without {name}");
            }
            assert_eq!(with(json!({ "of": "another type" })), wrong(name), "{place}");
        }
        let mut more = all.clone();
        more.insert("zzz".to_owned(), json!(1));
        assert_eq!(parse(method, more), wrong("zzz"), "{place}");
    }
}

#[test]
fn every_reply_has_exactly_the_described_fields_with_their_types() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    let interface = parsed_interface();
    for method in interface.methods().filter(|method| method.name().as_str() != "Events") {
        let name = method.name().as_str();
        let reply = client.call(&format!("{INTERFACE_NAME}.{name}"), &Value::Object(all_parameters(method)));
        assert_eq!(reply.get("error"), None, "{name}: {reply}");
        let outputs: Vec<_> = method.outputs().map(|output| (output.name().as_str(), output.ty())).collect();
        assert_fields(&interface, &outputs, &reply["parameters"], name);
    }
    let reply = client.exchange(r#"{"method":"org.pjw.Warden.Events","more":true}"#);
    let event = Type::Custom("Event".try_into().unwrap());
    assert_type(&interface, &event, &reply["parameters"]["event"], "Events.event");
}

#[test]
fn the_interface_description_has_exactly_the_errors_of_the_server_with_their_parameters() {
    let errors: Vec<(String, Vec<String>)> = parsed_interface()
        .errors()
        .map(|error| {
            let fields = error.fields().map(|field| field.name().as_str().to_owned()).collect();
            (format!("{INTERFACE_NAME}.{}", error.name().as_str()), fields)
        })
        .collect();
    let own_errors = [CallError::Refused, CallError::NotAllowed, CallError::Busy, CallError::WouldFreeze];
    let sent = own_errors.map(|error| {
        let (name, parameters) = error(String::new()).to_varlink();
        (name, parameters.keys().cloned().collect())
    });
    assert_eq!(errors, sent);
}

#[test]
fn the_server_returns_the_description_of_each_of_its_interfaces() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    let info = client.exchange(r#"{"method":"org.varlink.service.GetInfo"}"#);
    let interfaces = info["parameters"]["interfaces"].as_array().unwrap().clone();
    assert_eq!(interfaces, [json!("org.varlink.service"), json!(INTERFACE_NAME)]);
    for name in interfaces {
        let method = "org.varlink.service.GetInterfaceDescription";
        let reply = client.call(method, &json!({ "interface": name }));
        let text = reply["parameters"]["description"].as_str().unwrap().to_owned();
        assert_eq!(Interface::try_from(text.as_str()).unwrap().name().as_str(), name);
    }
}

#[test]
fn the_service_interface_refuses_wrong_parameters_and_unknown_methods() {
    let server = TestServer::start(ServerLimits::default());
    let mut client = server.connect();
    let describe = "GetInterfaceDescription";
    for (method, parameters, error, error_parameters) in [
        ("GetInfo", json!({ "x": 1 }), "InvalidParameter", json!({ "parameter": "x" })),
        (describe, json!({}), "InvalidParameter", json!({ "parameter": "interface" })),
        (describe, json!({ "interface": 7 }), "InvalidParameter", json!({ "parameter": "interface" })),
        (describe, json!({ "interface": "a.b" }), "InterfaceNotFound", json!({ "interface": "a.b" })),
        ("Nonsense", json!({}), "MethodNotFound", json!({ "method": "org.varlink.service.Nonsense" })),
    ] {
        let reply = client.call(&format!("org.varlink.service.{method}"), &parameters);
        let expected =
            json!({ "error": format!("org.varlink.service.{error}"), "parameters": error_parameters });
        assert_eq!(reply, expected, "{method} {parameters}");
    }
}
