//! A browser that a test drives: Debian's headless Chromium, by the DevTools protocol on two pipes.
//!
//! Messages are JSON with a zero byte after each. The browser reads them from descriptor 3 and
//! writes them to descriptor 4, which a shell makes of its standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use data_encoding::BASE64;
use serde_json::{Value, json};

use crate::place::Place;
use crate::run::bounded;

/// The program; `make deps` installs it.
const BROWSER: &str = "chromium-headless-shell";

/// A page in a browser of its own. Dropping it ends the browser.
pub(crate) struct Browser {
    child: Child,
    /// `None` once the browser is to end.
    commands: Option<ChildStdin>,
    messages: BufReader<ChildStdout>,
    session: Option<String>,
    calls: u64,
    /// Whether the page is loaded.
    is_loaded: bool,
    /// The addresses of everything that the page has asked for.
    requests: Vec<String>,
    _place: Place,
}

impl Browser {
    /// Starts a browser with an empty page. Its time zone is UTC.
    pub(crate) fn start() -> Browser {
        let place = Place::new();
        let script = "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>\"$BROWSER_LOG\"";
        let profile = format!("--user-data-dir={}", place.file("profile"));
        let line = [
            "sh",
            "-c",
            script,
            "sh",
            BROWSER,
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            &profile,
        ];
        let mut command = bounded(&line);
        command.env("TZ", "UTC").env("BROWSER_LOG", place.file("browser.log"));
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.expect("timeout is part of coreutils");
        let commands = child.stdin.take();
        let messages = BufReader::new(child.stdout.take().expect("it was asked to be piped"));
        let mut browser = Browser {
            child,
            commands,
            messages,
            session: None,
            calls: 0,
            is_loaded: false,
            requests: Vec::new(),
            _place: place,
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Network.enable", "Runtime.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    /// Calls a method of the protocol, and returns its result.
    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let commands = self.commands.as_mut().expect("it is there until the end");
        commands.write_all(format!("{message}\0").as_bytes()).expect("the browser reads");
        loop {
            let answer = self.receive(method);
            if answer["id"] == self.calls {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    /// The next message of the browser, while the test waits for `what`.
    fn receive(&mut self, what: &str) -> Value {
        let mut bytes = Vec::new();
        self.messages.read_until(0, &mut bytes).expect("the browser writes");
        let text = bytes.strip_suffix(&[0]);
        let text = text.unwrap_or_else(|| panic!("{what}: {BROWSER} has ended; `make deps`"));
        let message: Value = serde_json::from_slice(text).expect("a message is JSON");
        match message["method"].as_str() {
            Some("Network.requestWillBeSent") => {
                let url = &message["params"]["request"]["url"];
                self.requests.push(url.as_str().unwrap_or_default().to_owned());
            }
            Some("Page.loadEventFired") => self.is_loaded = true,
            _ => {}
        }
        message
    }

    /// Opens an address, and waits until the page is loaded: what a page before it evaluates has no
    /// result.
    pub(crate) fn open(&mut self, url: &str) {
        self.is_loaded = false;
        let done = self.call("Page.navigate", json!({ "url": url }));
        assert!(done.get("errorText").is_none(), "{url}: {done}");
        while !self.is_loaded {
            self.receive(url);
        }
    }

    /// The value of an expression in the page; that of a promise once it has one.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let what = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", what);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until a condition holds in the page, a minute at most.
    pub(crate) fn wait(&mut self, condition: &str) {
        let look = format!(
            "new Promise((done) => {{ let left = 3000; const look = () => {{
              if ({condition}) done(true);
              else if ((left -= 1) > 0) setTimeout(look, 20);
              else done(JSON.stringify(document.documentElement.dataset)
                + document.body.innerText.slice(0, 2000));
            }}; look(); }})"
        );
        assert_eq!(self.value(&look), true, "{condition}");
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", json!({ "type": kind, "key": key }));
        }
    }

    /// Clicks a place in the window, in pixels from its upper left corner.
    pub(crate) fn click(&mut self, x: f64, y: f64) {
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    /// Gives the page a size in pixels and a colour scheme: `light` or `dark`.
    pub(crate) fn look(&mut self, width: u32, height: u32, scheme: &str) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.call("Emulation.setEmulatedMedia", json!({ "features": [feature] }));
    }

    /// A picture of the page as PNG.
    pub(crate) fn picture(&mut self) -> Vec<u8> {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let data = shot["data"].as_str().expect("a picture is text in base 64");
        BASE64.decode(data.as_bytes()).expect("a picture is text in base 64")
    }

    /// The addresses of everything that the page has asked for.
    pub(crate) fn requests(&mut self) -> Vec<String> {
        // Those that the browser has reported, too.
        self.value("0");
        self.requests.clone()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser ends with its pipe.
        self.commands = None;
        // If it does not, its time limit ends it.
        let _ = self.child.wait();
    }
}
